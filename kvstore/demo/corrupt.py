"""Flip bytes on disk, in a record that the demo's prompts really use.

The record is found by what it is and not by where it should be: the NVMe tier is opened while
no daemon runs, the middle block of the longest stored prefix is read through it, and those very
bytes are looked for in the slot files. So this keeps working whatever the layout on disk is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from kvstore.demo import constants as c
from kvstore.demo.daemon import DemoError
from tiers.base import Get, Record
from tiers.errors import OpenError
from tiers.nvme import NvmeTier


def corrupt_one_record(directory: Path, capacity_bytes: int, slab_bytes: int) -> Record:
    """Damage the middle record of the longest prefix stored in an NVMe directory.

    The daemon must not run. Answers which record it was. Raises DemoError where there is none or
    the directory cannot be opened, OSError where a file cannot be written.
    """
    try:
        tier = NvmeTier([directory], capacity_bytes, slab_bytes)
    except OpenError as error:
        raise DemoError(str(error)) from error
    try:
        record = _middle_of_longest({record.key: record for record in tier.scan()})
        content = bytearray(record.size_bytes)
        [(answer, _)] = tier.get([(record.key, memoryview(content))])
    finally:
        tier.close()
    if answer is not Get.HIT:
        raise DemoError(f"the record to be damaged could not be read: {answer.value}")
    _flip(directory, bytes(content))
    return record


def _middle_of_longest(records: dict[bytes, Record]) -> Record:
    """The block in the middle of the longest stored prefix."""
    if not records:
        raise DemoError("nothing is stored on NVMe")
    longest = max((_ancestry(record, records) for record in records.values()), key=len)
    return longest[len(longest) // 2]


def _ancestry(record: Record, records: dict[bytes, Record]) -> list[Record]:
    """The record and all before it in its prefix that are stored, last first."""
    chain = [record]
    while (before := records.get(chain[-1].parent)) is not None:
        chain.append(before)
    return chain


def _flip(directory: Path, content: bytes) -> None:
    """Invert some bytes in the middle of `content`, in whichever file holds it."""
    for path in sorted(directory.glob("*.kvs")):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            offset = mapping.find(content)
            if offset < 0:
                continue
            middle = offset + len(content) // 2
            mapping[middle : middle + c.CORRUPT_BYTES] = bytes(
                byte ^ 0xFF for byte in mapping[middle : middle + c.CORRUPT_BYTES]
            )
            mapping.flush()
            return
    raise DemoError(f"the record to be damaged is in no slot file of {directory}")
