"""Which block is meant by the beginning of its hash: people copy ten digits out of a table and not sixty-four.

    6f66b1302f ─▶ rules and reports ─▶ every block of the index, in steps ─▶ none, one, or several

A whole hash is taken as it is, known or not: a prefix may be pinned before it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.constants import STEP_BLOCKS
from kvstore.index.block import Namespace
from kvstore.steps import Steps

FOUND_PREFIXES_MAX = 5  # blocks that are named where the beginning of a hash is not unique


def prefixes_steps(beginning: str, spaces: Sequence[Namespace], shown: Iterable[str]) -> Steps[list[str]]:
    """Hashes in hex that begin so, at most FOUND_PREFIXES_MAX. beginning: hex digits in lower case. shown: those that
    people see without asking for them: of rules, and of reports."""
    if any(len(beginning) == 2 * namespace.hash_bytes for namespace in spaces):
        return [beginning]
    found = {block_hash for block_hash in shown if block_hash.startswith(beginning)}
    start = bytes.fromhex(beginning[: len(beginning) & ~1])
    for namespace in spaces:
        for looks, block in enumerate(namespace.blocks.walk(), 1):
            if looks % STEP_BLOCKS == 0:
                yield
            if block.hash.startswith(start) and block.hash.hex().startswith(beginning):
                found.add(block.hash.hex())
                if len(found) >= FOUND_PREFIXES_MAX:
                    break
        yield
    return sorted(found)[:FOUND_PREFIXES_MAX]
