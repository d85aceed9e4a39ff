"""One process, from open to close."""
