"""What became of every looked-up token."""
