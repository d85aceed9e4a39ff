"""A region's list of what became durable: written, followed, shortened by snapshots."""
