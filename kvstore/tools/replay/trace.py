"""Traces: requests in the form of the Mooncake release, one JSON object a line, gzip or plain.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

Lines of `kvstore record` say what a block is: `block_tokens`, and `block_bytes` of a tier. Where lines do not, `Assumed` is
what they are read by: blocks of 512 tokens and milliseconds, as in that release, unless the user says otherwise. Lines whose
`input_length` and number of ids do not fit are counted, so that a wrong assumption is seen.

A hash id stands for a block and everything before it, so it follows the same id wherever it is named. Recorders that cut
prompts, or made-up traces, may name one behind several others, or twice in a prompt: each of these is a block of its own
here, as it would be for an engine, and counted. The last block is partly filled when `input_length` is given and is not a
whole number of blocks; an engine never stores it, `drop_tail` leaves it out. Lines may be out of order by accident of
logging: time never runs backwards here.
"""

from __future__ import annotations

import gzip
import math
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.constants import MIB, REPLAY_BLOCK_TOKENS, REPLAY_HASH_BYTES
from kvstore.errors import ReplayError

REPLAY_LINE_BYTES_MAX = 64 * MIB  # a prompt of ten million blocks

GZIP_MAGIC = b"\x1f\x8b"

_SIZE_MAX = 1 << 53  # further a float does not count, and a larger one still cannot be divided
_Size = Annotated[int, Meta(ge=1, le=_SIZE_MAX)]


class Line(msgspec.Struct):
    """One request as it is recorded; other fields are allowed and not read."""

    timestamp: Annotated[float, Meta(ge=-1e15, le=1e15)]  # infinity is read as a number, too
    hash_ids: list[int]
    input_length: Annotated[int, Meta(ge=0, le=_SIZE_MAX)] | None = None  # not every recorder has it
    block_tokens: _Size | None = None
    block_bytes: _Size | None = None


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a line does not say itself. block_tokens: of its blocks; a_second: what its timestamps count in one."""

    block_tokens: int = REPLAY_BLOCK_TOKENS
    a_second: int = 1000


MOONCAKE = Assumed()


@dataclass(slots=True)
class Trace:
    """Requests in order: when (seconds), and the concatenated hashes of the prompt's blocks."""

    times_s: list[float] = field(default_factory=list)
    prompts: list[bytes] = field(default_factory=list)
    block_refs: int = 0
    unique_blocks: int = 0
    unchained_ids: int = 0  # ids that follow several others, or begin some prompts and not all
    repeated_ids: int = 0  # that a prompt had named before
    assumed_lines: int = 0  # that do not say how many tokens a block has
    unfit_lines: int = 0  # whose input_length is not that of so many blocks
    fitting_tokens: int = 0  # of a block, by the first of these
    sized_blocks: int = 0  # of the unique ones: those of which the lines say what they take …
    sized_bytes: int = 0  # … and that
    cut_lines: int = 0  # last lines that a recorder could not end, which are left out

    @property
    def block_bytes(self) -> float | None:
        """What a block takes in a tier, on average; None where not all lines say it."""
        return self.sized_bytes / self.sized_blocks if self.sized_blocks == self.unique_blocks else None


def read(paths: Sequence[Path], drop_tail: bool = False, assumed: Assumed = MOONCAKE) -> Trace:
    """The requests of several files, one after the other. Raises ReplayError naming file and line."""
    trace = Trace()
    for path in paths:
        names: dict[tuple[bytes, int], bytes] = {}  # files do not share blocks: they were recorded apart
        for line in _lines(path, trace):
            ids = line.hash_ids
            block_tokens = line.block_tokens or assumed.block_tokens
            _note(line, block_tokens, trace)
            if drop_tail and ids and _is_partial(line, block_tokens):
                ids = ids[:-1]
            if not ids:
                continue
            hashes: list[bytes] = []
            known = trace.unique_blocks
            name = b""  # of the block before
            for hash_id in ids:
                name = names.get((name, hash_id)) or _name(names, (name, hash_id), trace)
                hashes.append(name)
            if line.block_bytes is not None:
                trace.sized_blocks += trace.unique_blocks - known
                trace.sized_bytes += (trace.unique_blocks - known) * line.block_bytes
            now_s = line.timestamp / assumed.a_second
            trace.times_s.append(max(now_s, trace.times_s[-1]) if trace.times_s else now_s)
            trace.prompts.append(b"".join(hashes))
            trace.block_refs += len(hashes)
        behind = Counter(hash_id for _, hash_id in names)
        trace.unchained_ids += sum(blocks > 1 for blocks in behind.values())
    if not trace.prompts:
        raise ReplayError(f"no requests with blocks in {', '.join(map(str, paths))}")
    return trace


def _name(names: dict[tuple[bytes, int], bytes], block: tuple[bytes, int], trace: Trace) -> bytes:
    """The hash bytes of a block (the one before it, its id) that was not named before."""
    name = names[block] = trace.unique_blocks.to_bytes(REPLAY_HASH_BYTES, "big")
    trace.unique_blocks += 1
    return name


def _note(line: Line, block_tokens: int, trace: Trace) -> None:
    """What of a line the reader of the figures should know."""
    blocks, tokens = len(line.hash_ids), line.input_length
    trace.repeated_ids += blocks - len(set(line.hash_ids))
    trace.assumed_lines += line.block_tokens is None
    if (
        tokens and not blocks - 1 <= tokens / block_tokens <= blocks + 1
    ):  # one more: recorders leave out the partly filled one
        trace.unfit_lines += 1
        trace.fitting_tokens = trace.fitting_tokens or (_power_of_two(tokens / blocks) if blocks else 0)


def _power_of_two(number: float) -> int:
    """The nearest one: what blocks have."""
    return 1 << max(0, round(math.log2(max(1.0, number))))


def _is_partial(line: Line, block_tokens: int) -> bool:
    tokens = line.input_length
    return tokens is not None and tokens < len(line.hash_ids) * block_tokens


def _lines(path: Path, trace: Trace) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    number, text = 0, b""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            while text := file.readline(REPLAY_LINE_BYTES_MAX):
                number += 1
                if text.strip():
                    yield decoder.decode(text.removeprefix(BOM_UTF8) if number == 1 else text)
    except (OSError, EOFError) as error:
        raise ReplayError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except zlib.error as error:
        raise ReplayError(f"{path}: damaged gzip after line {number}: {error}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        is_cut = not text.endswith(b"\n") and len(text) < REPLAY_LINE_BYTES_MAX
        if number > 1 and is_cut and not isinstance(error, msgspec.ValidationError):
            trace.cut_lines += 1
            return
        raise ReplayError(f"{path}:{number}: {error}") from error
    except RecursionError as error:
        raise ReplayError(f"{path}:{number}: nested too deeply") from error
