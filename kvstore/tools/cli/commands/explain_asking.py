"""Asking the daemon what would become of blocks, and the document that `kvstore explain` makes of its answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.protocol.outcomes import HITS, MEANINGS, NAMES
from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.prefixes import find_prefix, namespace_of
from kvstore.units import count, percent, printable

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.ledger.explain import Space

HIT_NAMES = [NAMES[number] for number in HITS]


def chosen(known: Sequence[Space], args: argparse.Namespace) -> list[Space]:
    """The namespaces of the one engine that is meant. Raises CliError."""
    from kvstore.ledger import explain

    try:
        return explain.choose(known, args.namespace.lower(), args.model, args.tenant)
    except explain.Unclear as error:
        code = NOT_FOUND if isinstance(error, explain.NoneSuch) else USAGE
        raise CliError(f"explain: {printable(str(error))}", exit_code=code) from error


def explain_prefix(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The document of `-o json` for a prefix that is known by its hash alone, as reports show it. Raises CliError, Unavailable, Refused."""
    selector = namespace_of("explain", args)
    block_hash = find_prefix(client, "explain", args.prefix, selector)
    chains = {digest.hex(): hashes for digest, hashes in client.chains(block_hash, selector)}
    if not chains:
        raise CliError(
            f"explain: prefix {args.prefix}: no tier of this node knows it (a bucket may have it all the same)",
            exit_code=NOT_FOUND,
        )
    spaces = chosen([space for space in client.list_namespaces() if space["digest"] in chains], args)
    size, hashes = len(block_hash), chains[spaces[0]["digest"]]
    fine = [hashes[start : start + size] for start in range(0, len(hashes), size)]
    # Namespaces of one engine share hashes where their blocks are of one size.
    alike = [space for space in spaces if chains[space["digest"]] == hashes]
    block_tokens = alike[0]["block_tokens"] or 1
    return document_of(client, alike, alike, fine, (block_tokens, block_tokens, len(fine) * block_tokens))


def document_of(
    client: Client,
    spaces: Sequence[Space],
    full: Sequence[Space],
    fine: Sequence[bytes],
    sizes: tuple[int, int, int],
) -> dict[str, Any]:
    """What is said of these hashes. spaces: of the engine; full: those that decide. sizes: tokens of a hash, of a block, of the
    prompt."""
    from kvstore.ledger import explain
    from kvstore.protocol import outcomes

    step, block_tokens, count_tokens = sizes
    answers, places = _ask_all(client, full, fine, step, block_tokens)
    by_block = explain.judged(answers)
    found = explain.runs(by_block, block_tokens, count_tokens)
    hit_tokens = sum(run.tokens for run in found if run.outcome in HIT_NAMES)
    hashes = fine[block_tokens // step - 1 :: block_tokens // step]
    return {
        "model": spaces[0]["fields"].get("model", ""),
        "tenant": spaces[0]["fields"].get("tenant", ""),
        "namespaces": [space["digest"] for space in full],
        "tokens": count_tokens,
        "block_tokens": block_tokens,
        "hit_tokens": hit_tokens,
        "summary": summary(found, count_tokens, hit_tokens, any(map(explain.is_windowed, spaces))),
        "blocks": [
            {
                "block": number,
                "hash": block_hash.hex(),
                "outcome": outcomes.NAMES[outcome],
                "tiers": [tier for bit, tier in ((1, "dram"), (2, "nvme")) if places[number] & bit],
            }
            for number, (block_hash, outcome) in enumerate(zip(hashes, by_block, strict=True))
        ],
        "runs": [
            {**{slot: getattr(run, slot) for slot in run.__slots__}, "tokens": run.tokens} for run in found
        ],
    }


def summary(runs: Sequence[Any], tokens: int, hit_tokens: int, windowed: bool) -> str:
    """One sentence: how much would hit, and why the rest would not."""
    if not tokens:
        return "The prompt is empty."
    sentence = f"{count(hit_tokens)} of {count(tokens)} tokens ({percent(hit_tokens / tokens)}) would hit"
    missed = [run for run in runs if run.outcome not in HIT_NAMES]
    if missed:
        first = missed[0]
        why = f"{first.outcome} ({MEANINGS[first.outcome]})"
        sentence += f"; from token {count(first.first_token)} on they would not, for the reason {why}"
    end = ". Sliding windows need only the end of a prefix; they are not judged here." if windowed else "."
    return sentence + end


def _ask_all(
    client: Client, spaces: Sequence[Space], fine: Sequence[bytes], step: int, block_tokens: int
) -> tuple[list[list[int]], bytes]:
    """Outcomes of every block of `block_tokens`, once for each question; and where it is in every space."""
    from kvstore.protocol.frames import FRAME_BYTES_MAX, HASHES_MAX, LOOKUP_NAMESPACES_MAX
    from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME

    count = len(fine) * step // block_tokens
    answers: list[list[int]] = []
    everywhere = [IN_DRAM | IN_NVME] * count
    by_size: dict[int, list[bytes]] = {}
    for space in spaces:
        by_size.setdefault(space["block_tokens"], []).append(bytes.fromhex(space["digest"]))
    for size, digests in by_size.items():
        hashes, each = fine[size // step - 1 :: size // step], block_tokens // size
        if len(hashes) > HASHES_MAX:
            raise CliError(
                f"explain: {len(hashes)} blocks; at most {HASHES_MAX} are allowed", exit_code=USAGE
            )
        hashes = hashes[: count * each]
        at_once = max(1, min(LOOKUP_NAMESPACES_MAX, FRAME_BYTES_MAX // 2 // max(1, len(hashes))))
        for start in range(0, len(digests), at_once):
            residency, found = client.explain(digests[start : start + at_once], b"".join(hashes))
            answers += [list(found[offset::each]) for offset in range(each)]
            for places in residency:
                for number in range(count):
                    for place in places[number * each : (number + 1) * each]:
                        everywhere[number] &= place
    return answers, bytes(everywhere)
