"""Fuzz: whatever comes from outside, changed in every way that an accident or a hostile hand changes it."""
