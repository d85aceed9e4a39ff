"""A region as its nodes use it: read, written, kept in order."""
