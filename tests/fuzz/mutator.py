"""The mutator: valid examples of a format, made wrong.

    bytes   ─▶ changed    flipped bits, cut off, parts moved, doubled and left out, numbers replaced, nesting without end
    a value ─▶ nonsense   one of its parts, however deep, replaced by what its reader may not expect, or left out, or doubled

`changed` finds what a reader of bytes believes; `nonsense` what is believed behind a checksum that matches. Everything follows from
the chance that is given.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

INPUTS = int(os.environ.get("INPUTS", "100"))  # of each format; `make soak` asks for 100,000

NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 4096, 65535, 65536,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 3 << 30, 1 << 40, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, -(1 << 31), -(1 << 63),
    float("nan"), float("inf"), float("-inf"), -0.0, 1e308, -1e308, 5e-324, 0.5,
)  # fmt: skip
TEXTS = ("", "a", "..", "/", "a/b", "\0", "\x1b[2J", "\ud7ff", "é" * 300, "x" * 70_000, "a note.txt", "eu\n")
NESTED_DEPTHS = (2, 40, 200)  # of lists in lists; deeper ones only bytes can say
NESTED_BYTES = (b"\x91" * 100_000, b"\x81\xa1a" * 30_000, b"[" * 100_000, b'{"a":' * 20_000)


def changed(chance: random.Random, content: bytes) -> bytes:
    """The same with one to four accidents."""
    found = bytes(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        found = chance.choice(_ACCIDENTS)(chance, found)
    return found


def nonsense(chance: random.Random, value: Any) -> Any:
    """The same value with one of its parts replaced. value: of lists, dictionaries, numbers, texts and bytes."""
    if isinstance(value, list | tuple) and value and chance.random() < 0.85:
        items = list(value)
        at = chance.randrange(len(items))
        what = chance.random()
        if what < 0.06:
            del items[at]
        elif what < 0.12:
            items.insert(at, items[chance.randrange(len(items))])
        else:
            items[at] = nonsense(chance, items[at])
        return items
    if isinstance(value, dict) and value and chance.random() < 0.85:
        found = dict(value)
        key = chance.choice(list(found))
        what = chance.random()
        if what < 0.08:
            del found[key]
        elif what < 0.16:
            found[chance.choice(TEXTS)] = found.pop(key)
        else:
            found[key] = nonsense(chance, found[key])
        return found
    return _other(chance, value)


def _other(chance: random.Random, value: Any) -> Any:
    if isinstance(value, bytes | str) and value and chance.random() < 0.5:
        size = chance.choice((len(value) - 1, len(value) // 2, len(value) + 1, 2 * len(value)))
        return (value * 3)[:size]
    if isinstance(value, int | float) and chance.random() < 0.3:
        return value + chance.choice((-1, 1)) if value == value else 0
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice(TEXTS),
        lambda: chance.randbytes(chance.choice((0, 1, 15, 16, 17, 64, 65, 5000))),
        lambda: None,
        list,
        dict,
        lambda: [value] * chance.choice((2, 5000)),
        lambda: {str(number): value for number in range(100)},
        lambda: _nested(chance.choice(NESTED_DEPTHS)),
    )
    return chance.choice(kinds)()


def _nested(deep: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(deep):
        found = [found]
    return found


# -- accidents to bytes --


def _flip(chance: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 8)) if found else 0):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def _cut(chance: random.Random, content: bytes) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _lengthen(chance: random.Random, content: bytes) -> bytes:
    return content + chance.randbytes(chance.choice((1, 100, 70_000)))


def _splice(chance: random.Random, content: bytes) -> bytes:
    """A part of it somewhere else, in place of what is there, before it, or nowhere."""
    start, at = chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)
    part = content[start : start + chance.randrange(1, 40)]
    return content[:at] + chance.choice((part, b"")) + content[at + chance.choice((0, len(part))) :]


def _number(chance: random.Random, content: bytes) -> bytes:
    """Four or eight bytes of it are a number that nobody expects."""
    size = chance.choice((1, 2, 4, 8))
    at = chance.randrange(len(content) + 1)
    number = chance.choice([n for n in NUMBERS if isinstance(n, int)]) % (1 << 8 * size)
    return content[:at] + number.to_bytes(size, chance.choice(("little", "big"))) + content[at + size :]


def _nest(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(NESTED_BYTES) + content[at:]


_ACCIDENTS = (_flip, _flip, _flip, _cut, _lengthen, _splice, _number, _number, _nest)
