"""A service on another machine asks a node: what of a prompt is there, and has a model preloaded."""
