"""Packs: runs of records of one prefix in one object."""
