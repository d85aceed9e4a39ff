"""Where bytes live: null, memory, DRAM arena, NVMe (imports nothing of ours)."""
