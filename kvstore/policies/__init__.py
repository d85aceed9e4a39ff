"""Eviction policies: which block leaves a tier first."""
