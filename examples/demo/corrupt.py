"""Flip bytes on disk, in a record that the demo's prompts really use.

The record is found by what it is and not by where it should be: the NVMe device is opened while
no daemon runs, the middle block of the longest stored prefix is read through it, and those very
bytes are looked for in the slot files. So this keeps working whatever the layout on disk is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from kvstore.tools.bench.daemon import DaemonError
from tiers.base import Get
from tiers.errors import OpenError
from tiers.nvme.device import Device, Row

CORRUPT_BYTES = 64  # flipped in the middle of one record


def corrupt_one_record(directory: Path, capacity_bytes: int, slab_bytes: int) -> Row:
    """Damage the middle record of the longest prefix stored in an NVMe directory.

    The daemon must not run. Returns which record it was. Raises DaemonError where there is none or
    the directory cannot be opened, OSError where a file cannot be written.
    """
    try:
        device = Device(directory, capacity_bytes, slab_bytes)
        device.open()
    except OpenError as error:
        raise DaemonError(str(error)) from error
    try:
        row = _middle_of_longest({row.key: row for piece in device.scan() for row in piece.rows()})
        content = bytearray(row.size_bytes)
        [(answer, _)] = device.read([(row.slot, row.key, memoryview(content))])
    finally:
        device.close()
    if answer is not Get.HIT:
        raise DaemonError(f"the record to be damaged could not be read: {answer.value}")
    _flip(directory, bytes(content))
    return row


def _middle_of_longest(rows: dict[bytes, Row]) -> Row:
    """The block in the middle of the longest stored prefix."""
    longest: list[Row] = []
    for row in rows.values():
        chain = [row]
        while (before := rows.get(chain[-1].parent)) is not None:
            chain.append(before)
        longest = max(longest, chain, key=len)
    if not longest:
        raise DaemonError("nothing is stored on NVMe")
    return longest[len(longest) // 2]


def _flip(directory: Path, content: bytes) -> None:
    """Invert some bytes in the middle of `content`, in whichever file holds it."""
    for path in sorted(directory.glob("*.kvs")):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            offset = mapping.find(content)
            if offset < 0:
                continue
            middle = offset + len(content) // 2
            mapping[middle : middle + CORRUPT_BYTES] = bytes(
                byte ^ 0xFF for byte in mapping[middle : middle + CORRUPT_BYTES]
            )
            mapping.flush()
            return
    raise DaemonError(f"the record to be damaged is in no slot file of {directory}")
