"""`kvstore bench`: what this machine does with our tiers, each figure with the limit it is measured against.

    plan ─▶ runner ─┬─ dram      put, get, view      against one thread's memcpy
                    ├─ lookup    2048 hashes         against a bare round trip
                    ├─ disk      Device.write, read  against pwritev and preadv with O_DIRECT
                    ├─ promote   NVMe → DRAM         against preadv with O_DIRECT
                    └─ packs     a region's bucket   against obstore alone
                          └─▶ figures ─▶ JSON or a table

A figure alone says little on a shared or virtual machine: what else ran decides. So each is
taken in turn with its limit (A B A B …), and a ratio is the median of the rounds' own
ratios, each made of two neighbours in time. `other_cpu_percent` says how much of the
machine others used meanwhile.

Everything goes through the real parts: `kvstore serve` as a process of its own, the client
that engines use, the tier's own code. Nothing here is imported by the daemon.
"""
