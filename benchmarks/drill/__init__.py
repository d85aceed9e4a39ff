"""Twenty faults, one by one, under traffic: does everything that people look at name the cause, and is it gone when the fault is over?

python -m benchmarks.drill [FAULT …] [-o json] [--list]
"""
