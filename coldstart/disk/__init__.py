"""Models on a node's disk: filled chunk by chunk, whole or not there at all, read."""
