"""Where bytes live: the arena in DRAM, files on NVMe devices, buckets and packs (imports nothing of ours)."""
