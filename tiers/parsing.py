"""What parsers raise: everything that bytes from outside can make them raise is one kind of failure.

msgspec raises its own errors for what does not fit, and Python's for nesting without end, text that is none, numbers that
are too large and memory that is not there. A reader catches all of them, once, and raises an error of its own.
"""

from __future__ import annotations

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


def parser_failure(error: BaseException) -> str:
    """What went wrong, in a few words that can be printed."""
    words = f"{type(error).__name__}: {error}" if not isinstance(error, msgspec.MsgspecError) else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in words[:_WORDS_MAX])
