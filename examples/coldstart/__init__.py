"""`make demo-coldstart`: a model published once, then loaded by real engines from everywhere it can be (phases.py)."""
