"""Bytes between tiers."""
