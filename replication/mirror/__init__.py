"""A region that copies from others, by rules: pulled, verified, announced; and whether all is there."""
