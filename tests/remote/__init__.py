"""The client of other nodes."""
