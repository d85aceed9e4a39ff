"""The arena in shared memory: its files, slots, pages and owners."""
