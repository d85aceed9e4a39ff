"""Stores of objects: S3, Google, Azure, a directory, memory: one interface."""
