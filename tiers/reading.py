"""Reads files that users name, and small files of our own: one reader, one kind of error, whatever lies there.

    open ─▶ is it a file? ─▶ so many bytes at most ─▶ UTF-8, with or without a byte order mark ─▶ JSON, TOML

Nothing is waited for (a FIFO, a terminal), nothing is read without end (/dev/zero, a disk image), and whatever a
parser thinks of what it gets, there is one error: `Unreadable`. What that costs is for the caller to say; but a file of our own that
may be sound, and only cannot be read now, is not replaced by an empty one (`require_damaged`).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiers.errors import NEVER_HEALS, OpenError, SettingError

T = TypeVar("T")

_NO_FILE = frozenset(
    {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ENOTDIR}
)  # a link, a socket, …
_MARK = b"\xef\xbb\xbf"  # some editors begin every text with it


class Unreadable(Exception):
    """The file cannot be used. why: in words, without its name. is_missing: nothing is there. number: of the system's error, 0
    where it was read and is not as it should be."""

    def __init__(self, path: Path, why: str, is_missing: bool = False, number: int = 0) -> None:
        super().__init__(f"{path}: {why}")
        self.why = why
        self.is_missing = is_missing
        self.number = number

    @property
    def may_be_sound(self) -> bool:
        """Nothing is known of what is in it: no permission, a sick disk, too many open files."""
        return bool(self.number) and not self.is_missing and self.number not in _NO_FILE


def require_damaged(error: Unreadable) -> None:
    """Before something takes the place of a file of our own. Raises OpenError for one that may be sound."""
    if error.may_be_sound:
        kind = SettingError if error.number in NEVER_HEALS else OpenError
        raise kind(
            f"{error}: it may be sound, so it is left as it is; see that it can be read, or move it away"
        )


def read_bytes(path: Path, bytes_max: int, follow: bool = True, may_wait: bool = False) -> bytes:
    """All of a file of at most so many bytes. follow: a link. may_wait: for a writer into a FIFO, as a shell's <( )
    is one. Raises Unreadable."""
    try:
        flags = os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC | (0 if may_wait else os.O_NONBLOCK)
        fd = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
        with open(fd, "rb", buffering=0) as file:
            kind = os.fstat(fd).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind) or (stat.S_ISFIFO(kind) and may_wait)):
                raise Unreadable(path, "not a file")
            content = bytearray()
            while len(content) <= bytes_max and (data := file.read(bytes_max + 1 - len(content))):
                content += data
    except FileNotFoundError as error:
        raise Unreadable(path, f"{error.strerror}", is_missing=True) from error
    except OSError as error:
        raise Unreadable(path, error.strerror or f"{error}", number=error.errno or errno.EIO) from error
    except ValueError as error:  # NUL in the name
        raise Unreadable(path, f"not a path: {error}") from error
    if len(content) > bytes_max:
        raise Unreadable(path, f"too large: allowed are {bytes_max} bytes")
    return bytes(content)


def read_text(path: Path, bytes_max: int, may_wait: bool = False) -> str:
    """Raises Unreadable."""
    return as_text(path, read_bytes(path, bytes_max, may_wait=may_wait))


def as_text(path: Path, content: bytes) -> str:
    """UTF-8, without the mark that it may begin with. path: for the message. Raises Unreadable."""
    try:
        return content.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        raise Unreadable(path, f"not UTF-8 at byte {error.start}") from error


def read_json(path: Path, bytes_max: int, kind: type[T], follow: bool = True) -> T:
    """A file of JSON, as this type of msgspec allows it. Raises Unreadable."""
    return as_json(path, read_bytes(path, bytes_max, follow), kind)


def as_json(path: Path, content: bytes | msgspec.Raw, kind: type[T]) -> T:
    """path: for the message. Raises Unreadable."""
    try:
        return msgspec.json.decode(memoryview(content).tobytes().removeprefix(_MARK), type=kind)
    except RecursionError as error:
        raise Unreadable(path, "nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Unreadable(path, f"damaged: {error}") from error


def as_toml(path: Path, text: str) -> dict[str, Any]:
    """path: for the message. Raises Unreadable."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(path, f"not valid TOML: {error}") from error
    except RecursionError as error:
        raise Unreadable(path, "nested too deeply") from error
    except ValueError as error:  # Python's own limit
        digits = sys.get_int_max_str_digits()
        raise Unreadable(path, f"a number has too many digits: allowed are {digits}") from error
