"""In a module of its own: processes of other loaders (benchmarks.coldstart) have none of our packages."""


class BenchError(Exception):
    """The measurement cannot go on, or did not measure what it says; the message says which."""
