"""The NVMe directories of a daemon: who they were, how they are."""
