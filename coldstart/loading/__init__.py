"""Weights on their way into an engine: from disk through a ring, from DRAM, while they still come."""
