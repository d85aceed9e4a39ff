"""Tables of the kernel, and what parsers raise: everything that bytes from outside can make them raise is one kind of failure.

msgspec raises its own errors for what does not fit, and Python's for nesting without end, text that is none, numbers that
are too large and memory that is not there. A reader catches all of them, once, and raises an error of its own.
"""

from __future__ import annotations

import os
import re
import struct

import msgspec

ParserErrors = (
    msgspec.MsgspecError,
    struct.error,
    ValueError,  # UnicodeDecodeError is one
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
)
_WORDS_MAX = 200  # a parser may quote what it read


def mount_path(field: bytes) -> str:
    """A path as the kernel's tables of mounts write it: \\040 for a space, and any bytes, as in `os.fsdecode`."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8) & 0xFF]), field))


def parser_failure(error: BaseException) -> str:
    """What went wrong, in a few words that can be printed."""
    words = f"{type(error).__name__}: {error}" if not isinstance(error, msgspec.MsgspecError) else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in words[:_WORDS_MAX])


def is_later(content: bytes | memoryview, magic: bytes) -> bool:
    """Whether this is what the magic names, in the format of a later version: the last digit of a magic is the number of its format."""
    found, digit = bytes(content[: len(magic)]), len(magic.rstrip(b"\n")) - 1
    return found[:digit] == magic[:digit] and found[digit : digit + 1].isdigit() and found > magic
