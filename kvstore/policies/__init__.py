"""Policies: which block leaves a tier first, and whether a new one is worth its room.

`learned.py` (with `reuse.py`) is the daemon's default; the others are references to compare
it with. `names.py` knows them by name.
"""
