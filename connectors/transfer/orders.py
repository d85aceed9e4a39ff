"""What an engine's scheduler orders of its workers: blocks to load and blocks to save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Part:
    """Blocks of one group of a request, in prefix order. parent: the hash before the first, b"" at the
    root. first: position in the prompt of the first of a load."""

    group: int
    block_ids: list[int]
    hashes: list[bytes]
    parent: bytes = b""
    first: int = 0


@dataclass(slots=True)
class Load:
    """Fill these blocks. sync: inside the step that asks. ticket: of the lookup that found them. on_disk:
    some are not in DRAM. A part without hashes fails: it was promised to the engine and could not be
    ordered."""

    request_id: str
    parts: list[Part]
    sync: bool
    ticket: int = 0
    on_disk: bool = False


@dataclass(slots=True)
class Save:
    """Offer these blocks; every rank reports `number` when it is through with it, whatever came of it. ticket:
    of the request's lookup, 0 if there was none."""

    number: int
    request_id: str
    parts: list[Part]
    ticket: int = 0


@dataclass(slots=True, frozen=True)
class SpaceSpec:
    """A namespace, complete enough to be registered with the daemon."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int
    fields: dict[str, str]


Specs = dict[int, SpaceSpec]  # group -> this rank's namespace
