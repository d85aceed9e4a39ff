"""Policies: which block leaves a tier first, and whether a new one is worth its room.

`learned` is the daemon's default, `lru` the other one that it can select; `names` knows both by name.
"""
