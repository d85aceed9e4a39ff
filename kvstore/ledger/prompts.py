"""A prompt as the namespaces of an engine hash it, and what a daemon says of it: for the command line and for gRPC.

    namespaces of one engine, token ids or hashes ─▶ Prompt ─▶ questions() ─▶ daemon: frames.Explain ─▶ document()

An engine's hashes are of as many tokens as the blocks of all its KV groups are whole multiples of; the prompt's blocks are
those of the group with the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.ledger import explain
from kvstore.ledger.explain import Space, Unclear
from kvstore.ledger.vllm_hash import ALGORITHMS, DEFAULT_SEED, block_hashes, none_hash
from kvstore.protocol.frames import FRAME_BYTES_MAX, HASHES_MAX, LOOKUP_NAMESPACES_MAX
from kvstore.protocol.outcomes import HITS, MEANINGS, NAMES
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.units import count, percent

SEEDS = (DEFAULT_SEED, "0", "42")  # that are tried where none is given
HIT_NAMES = [NAMES[number] for number in HITS]


class SeedUnknown(Unclear):
    """None of the seeds is the engine's."""


class Prompt(NamedTuple):
    """spaces: of the engine; full: those of them that decide. fine: hashes, joined, of `step` tokens and hash_bytes each. tokens:
    of the prompt."""

    spaces: Sequence[Space]
    full: Sequence[Space]
    fine: bytes
    hash_bytes: int
    step: int
    block_tokens: int
    tokens: int

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return len(self.fine) // self.hash_bytes * self.step // self.block_tokens

    @property
    def hashes(self) -> bytes:
        """Of its blocks, joined."""
        return self.of_size(self.block_tokens)

    def of_size(self, block_tokens: int) -> bytes:
        """The hashes of a group whose blocks have so many tokens."""
        each, size = block_tokens // self.step, self.hash_bytes
        end = self.blocks * (self.block_tokens // self.step) * size
        if each == 1:
            return self.fine[:end]
        return b"".join(self.fine[at - size : at] for at in range(each * size, end + 1, each * size))


class Question(NamedTuple):
    """What one frames.Explain asks. each: hashes for one block of the prompt."""

    digests: list[bytes]
    hashes: bytes
    each: int


Answer = tuple[Sequence[bytes], bytes]  # as frames.Explained has them


def of_tokens(spaces: Sequence[Space], tokens: Sequence[int], salt: str, seeds: Iterable[str]) -> Prompt:
    """spaces: of one engine. salt: cache_salt of the request. seeds: what PYTHONHASHSEED of the engine may be.

    Raises Unclear: SeedUnknown where it is none of these."""
    step, full = _step(spaces), _deciding(spaces)
    algorithm, parent = root(full[0]["fields"], seeds)
    fine = block_hashes(algorithm, parent, tokens, step, salt)
    return _prompt(spaces, full, b"".join(fine), len(parent), step, len(tokens))


def of_hashes(spaces: Sequence[Space], hashes: bytes) -> Prompt:
    """hashes: the engine's own, joined, from the first on. Raises Unclear."""
    size = spaces[0]["hash_bytes"]
    if len(hashes) % size:
        raise Unclear(f"{len(hashes)} bytes of hashes: a multiple of {size} is required")
    # Namespaces that say nothing of their blocks have one hash for each.
    step = _step(spaces) if any(space["block_tokens"] for space in spaces) else 1
    return _prompt(spaces, _deciding(spaces), hashes, size, step, len(hashes) // size * step)


def of_chains(spaces: Sequence[Space], chains: Mapping[str, bytes]) -> Prompt:
    """A prefix that a daemon knows. chains: its hashes, joined, by the digest of each namespace that does. Raises Unclear."""
    hashes = chains[spaces[0]["digest"]]
    # Namespaces of one engine share hashes where their blocks are of one size.
    alike = [space for space in spaces if chains[space["digest"]] == hashes]
    return of_hashes(alike, hashes)._replace(full=alike)


def root(fields: dict[str, str], seeds: Iterable[str]) -> tuple[str, bytes]:
    """The hash algorithm of a namespace and its NONE_HASH. Raises Unclear."""
    algorithm, digest = fields.get("hash", ""), fields.get("hash seed", "")
    if algorithm not in ALGORITHMS:
        what = f"hashes by {algorithm!r}" if algorithm else "of an engine that does not say how it hashes"
        raise Unclear(f"this namespace is {what}; known are {', '.join(ALGORITHMS)}")
    parent = none_hash(algorithm, digest, seeds)
    if parent is None:
        random = " (without one, xxhash starts from random bytes)" if "xxhash" in algorithm else ""
        raise SeedUnknown(random)
    return algorithm, parent


def _prompt(
    spaces: Sequence[Space], full: Sequence[Space], fine: bytes, hash_bytes: int, step: int, tokens: int
) -> Prompt:
    sizes = [space["block_tokens"] or step for space in full]
    if (most := tokens // min(sizes)) > HASHES_MAX:
        raise Unclear(f"{most} blocks; at most {HASHES_MAX} are allowed")
    return Prompt(spaces, full, fine, hash_bytes, step, max(sizes), tokens)


def _step(spaces: Sequence[Space]) -> int:
    """Tokens of one of the engine's hashes: what all its KV groups' blocks are whole multiples of."""
    sizes = [space["block_tokens"] for space in spaces]
    if 0 in sizes:
        raise Unclear(
            f"namespace {spaces[0]['digest'][:8]}: how many tokens a block has is not known; "
            "an engine says so when it attaches"
        )
    return math.gcd(*sizes)


def _deciding(spaces: Sequence[Space]) -> Sequence[Space]:
    return [space for space in spaces if not explain.needs_end_only(space["fields"])] or spaces


# -- asking --


def questions(prompt: Prompt) -> list[Question]:
    """What to ask the daemon."""
    by_size: dict[int, list[bytes]] = {}
    for space in prompt.full:
        by_size.setdefault(space["block_tokens"] or prompt.step, []).append(bytes.fromhex(space["digest"]))
    asked = []
    for size, digests in by_size.items():
        hashes = prompt.of_size(size)
        at_once = max(
            1, min(LOOKUP_NAMESPACES_MAX, FRAME_BYTES_MAX // 2 // (len(hashes) // prompt.hash_bytes + 1))
        )
        for start in range(0, len(digests), at_once):
            each = prompt.block_tokens // size
            asked.append(Question(digests[start : start + at_once], hashes, each))
    return asked


def judged(asked: Sequence[Question], answers: Sequence[bytes]) -> list[int]:
    """The outcome of each block of the prompt, from those that each question was answered with, or their leading part."""
    if len(asked) == 1 and asked[0].each == 1:
        return list(answers[0])
    columns = []
    for question, found in zip(asked, answers, strict=True):
        columns += [list(found[offset :: question.each]) for offset in range(question.each)]
    whole = min(map(len, columns), default=0)
    outcomes = explain.judged([column[:whole] for column in columns])
    # What one of them missed first is a part of the next block.
    missed = [column[whole] for column in columns if len(column) > whole and column[whole] not in HITS]
    return outcomes + missed[:1]


def document(prompt: Prompt, asked: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Any]:
    """What `kvstore explain -o json` prints; docs/cli.md names the fields."""
    by_block = judged(asked, [found for _, found in answers])
    places = _everywhere(prompt.blocks, asked, answers)
    hashes, size = prompt.hashes, prompt.hash_bytes
    found = explain.runs(by_block, prompt.block_tokens, prompt.tokens)
    hit_tokens = sum(run.tokens for run in found if run.outcome in HIT_NAMES)
    return {
        "model": prompt.spaces[0]["fields"].get("model", ""),
        "tenant": prompt.spaces[0]["fields"].get("tenant", ""),
        "namespaces": [space["digest"] for space in prompt.full],
        "tokens": prompt.tokens,
        "block_tokens": prompt.block_tokens,
        "hit_tokens": hit_tokens,
        "summary": summary(
            found,
            prompt.tokens,
            hit_tokens,
            any(explain.needs_end_only(space["fields"]) for space in prompt.spaces),
        ),
        "blocks": [
            {
                "block": number,
                "hash": hashes[number * size : (number + 1) * size].hex(),
                "outcome": NAMES[outcome],
                "tiers": [
                    tier for bit, tier in ((IN_DRAM, "dram"), (IN_NVME, "nvme")) if places[number] & bit
                ],
            }
            for number, outcome in enumerate(by_block)
        ],
        "runs": [
            {**{slot: getattr(run, slot) for slot in run.__slots__}, "tokens": run.tokens} for run in found
        ],
    }


def _everywhere(count: int, asked: Sequence[Question], answers: Sequence[Answer]) -> list[int]:
    """Of each block the tiers that have it in every namespace."""
    everywhere = [IN_DRAM | IN_NVME] * count
    for question, (residency, _) in zip(asked, answers, strict=True):
        for places in residency:
            for number, place in enumerate(places):
                everywhere[number // question.each] &= place
    return everywhere


def summary(runs: Sequence[Any], tokens: int, hit_tokens: int, has_ends: bool) -> str:
    """One sentence: how much would hit, and why the rest would not."""
    if not tokens:
        return "The prompt is empty."
    sentence = f"{count(hit_tokens)} of {count(tokens)} tokens ({percent(hit_tokens / tokens)}) would hit"
    missed = [run for run in runs if run.outcome not in HIT_NAMES]
    if missed:
        first = missed[0]
        why = f"{first.outcome} ({MEANINGS[first.outcome]})"
        sentence += f"; from token {count(first.first_token)} on they would not, for the reason {why}"
    end = " Sliding windows and recurrent states need only the end of a prefix; they are not judged here."
    return f"{sentence}.{end if has_ends else ''}"
