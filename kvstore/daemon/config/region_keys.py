"""The key file of a deployment: who has it may write what others believe of a bucket.

    one key a line, of 32 bytes and more: the first one seals, all of them verify

Whoever can read it can forge, so nobody else may. No key is in any message.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from tiers.bucket.seals import Seals
from tiers.reading import Unreadable, read_bytes

REGION_KEYS_MAX: Final = 4
REGION_KEY_BYTES_MIN: Final = 32
REGION_KEY_FILE_BYTES_MAX: Final = 16 << 10


def read_seals(path: Path) -> Seals:
    """Raises Unreadable."""
    content = read_bytes(path, REGION_KEY_FILE_BYTES_MAX)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise Unreadable(path, "others may read it: chmod 600")
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    if not 1 <= len(keys) <= REGION_KEYS_MAX or len(set(keys)) < len(keys):
        raise Unreadable(path, f"{len(keys)} keys: allowed are 1 to {REGION_KEYS_MAX}, each once, one a line")
    if (short := min(map(len, keys))) < REGION_KEY_BYTES_MIN:
        raise Unreadable(
            path,
            f"a key of {short} bytes: allowed are {REGION_KEY_BYTES_MIN} and more: openssl rand -hex 32 makes one",
        )
    return Seals(keys)
