"""Which block is in which tier, and who makes room."""
