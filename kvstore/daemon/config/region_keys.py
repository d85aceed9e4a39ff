"""The key file of a deployment: who has it may write what others believe of a bucket.

    one key a line, of 32 bytes and more: the first one seals, all of them verify

Whoever can read it can forge, so nobody else may. No key is in any message.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvstore.errors import StartError
from tiers.bucket.seals import Seals
from tiers.reading import Unreadable, read_bytes

REGION_KEYS_MAX: Final = 4
REGION_KEY_BYTES_MIN: Final = 32
REGION_KEY_FILE_BYTES_MAX: Final = 16 << 10


class KeyFileError(StartError):
    """The key file cannot be used."""


def read_seals(path: Path) -> Seals:
    """Raises KeyFileError."""
    try:
        content = read_bytes(path, REGION_KEY_FILE_BYTES_MAX)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except (OSError, Unreadable) as error:
        why = error.why if isinstance(error, Unreadable) else error.strerror
        raise KeyFileError(f"{path}: {why}") from error
    if mode & 0o077:
        raise KeyFileError(f"{path}: others may read it: chmod 600")
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    if not 1 <= len(keys) <= REGION_KEYS_MAX or len(set(keys)) < len(keys):
        raise KeyFileError(
            f"{path}: {len(keys)} keys: allowed are 1 to {REGION_KEYS_MAX}, each once, one a line"
        )
    if short := min(map(len, keys)) < REGION_KEY_BYTES_MIN and min(map(len, keys)):
        raise KeyFileError(
            f"{path}: a key of {short} bytes: allowed are {REGION_KEY_BYTES_MIN} and more: openssl rand -hex 32 makes one"
        )
    return Seals(keys)
