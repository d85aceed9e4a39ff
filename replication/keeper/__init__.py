"""The keeper of a region: the one who does its housekeeping, and what it tells everybody else."""
