"""Whether a tier is worth using now."""
