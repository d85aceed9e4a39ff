"""What runs beside the daemon, and is begun and ended with it."""
