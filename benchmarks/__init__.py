"""Benchmarks that need more than the tiers: a real engine with our connector. See README.md."""
