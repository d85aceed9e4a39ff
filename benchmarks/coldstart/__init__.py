"""How near models come to what buckets, disks and memory do by themselves, and how others fare beside it."""
