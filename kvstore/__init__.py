"""A tiered KV cache for inference engines: one daemon per node. See kvstore.client."""

__version__ = "0.1.0"
