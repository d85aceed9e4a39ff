"""How fast models come to a node, and from there into an engine."""
