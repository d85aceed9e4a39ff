"""vLLM's block hashes, computed here: what a prompt's blocks are called.

    NONE_HASH ─▶ H(NONE_HASH, tokens of block 0, salt) ─▶ H(hash 0, tokens of block 1, None) ─▶ …

H is SHA-256 or 128 bits of XXH3, over a pickle or over canonical CBOR of that triple; NONE_HASH
is H of a seed: PYTHONHASHSEED of the engine's process where that is set, else a fixed text. A namespace
has a digest of its NONE_HASH among its fields, so that a guess can be checked and never has to be trusted.
Prompts with LoRA adapters, images or embeddings have more in the triple and are not covered.

The little CBOR there is to write is written here: bytes, numbers, texts, None and tuples.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

DEFAULT_SEED = "vllm-none-hash"
SEED_FIELD_CHARS = 32  # of the hexadecimal digest that a namespace has of its NONE_HASH

HashFunction = Callable[[Any], bytes]


ALGORITHMS: dict[str, HashFunction] = {  # by the names that vLLM gives them
    "sha256": lambda value: _sha256(_pickled(value)),
    "sha256_cbor": lambda value: _sha256(cbor(value)),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor(value)),
}


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def none_hash(algorithm: str, seed_digest: str, seeds: Iterable[str]) -> bytes | None:
    """The NONE_HASH that the digest in a namespace's fields is of; None if none of these seeds makes it.

    Raises KeyError for an algorithm that is not in ALGORITHMS.
    """
    function = ALGORITHMS[algorithm]
    for seed in seeds:
        candidate = function(seed)
        if hashlib.sha256(candidate).hexdigest()[:SEED_FIELD_CHARS] == seed_digest:
            return candidate
    return None


def block_hashes(
    algorithm: str, parent: bytes, tokens: Sequence[int], block_tokens: int, salt: str = ""
) -> list[bytes]:
    """The hash of each whole block of a prompt. parent: NONE_HASH. salt: the request's cache_salt."""
    function = ALGORITHMS[algorithm]
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        parent = function((parent, tuple(tokens[start : start + block_tokens]), extra))
        hashes.append(parent)
    return hashes


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949) of bytes, texts, whole numbers below 2**64, None, and tuples of these."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        encoded = value.encode()
        return _head(3, len(encoded)) + encoded
    if isinstance(value, tuple):
        return _head(4, len(value)) + b"".join(map(cbor, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    raise TypeError(f"no CBOR for {type(value).__name__} here")


def _head(kind: int, number: int) -> bytes:
    """The first bytes of an item: its kind, and its value or length in as few bytes as possible."""
    if number < 24:
        return bytes((kind << 5 | number,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((kind << 5 | code,)) + number.to_bytes(size, "big")
    raise OverflowError("numbers of more than 64 bits are not covered")
