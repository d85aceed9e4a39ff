"""Residency bits: where a block is, as one number, in the index and in answers to clients."""

IN_DRAM = 1
IN_NVME = 2
IN_ANY = IN_DRAM | IN_NVME
WRITING = 32  # only in answers: it is not held, and is being written right now
IN_SHARED = 64  # only in answers to acquire: it was fetched from a shared level
BROKEN_PREFIX = 128  # only in answers: the block is there, a block before it is not
