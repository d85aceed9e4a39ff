"""Buckets in hostile hands."""
