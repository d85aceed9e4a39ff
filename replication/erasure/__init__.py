"""What is erased: tombstones, and all that hangs on what they name."""
