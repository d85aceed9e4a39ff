"""Starts that cannot hurt: small memory, other users, damaged files, and what is left behind."""
