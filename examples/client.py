"""Store and load bytes without an inference engine.

    kvstore serve &
    python examples/client.py

What is stored here stays: run it twice, and the second run finds everything. docs/python.md explains every call.
"""

from __future__ import annotations

import hashlib
import time

from kvstore.client import Client, Unavailable

BLOCK_TOKENS = 16
RECORD_BYTES = 1 << 20  # the KV of one block; the daemon takes any size up to that of a slab
PROMPT = [number * 7919 % 32_000 for number in range(1000)]

# Two programs share blocks exactly where this is equal, so it names all that makes bytes reusable.
IDENTITY = {"model": "org/model", "tenant": "examples", "dtype": "bfloat16"}


def block_hashes(tokens: list[int]) -> list[bytes]:
    """A name for each whole block: of its tokens, and of everything before it."""
    names: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = names[-1] if names else b""
        names.append(hashlib.sha256(before + repr(tokens[start : start + BLOCK_TOKENS]).encode()).digest())
    return names


def computed(number: int) -> bytes:
    """What a model would have computed for a block."""
    return number.to_bytes(4, "big") * (RECORD_BYTES // 4)


def main() -> int:
    hashes = block_hashes(PROMPT)
    digest = hashlib.blake2b(repr(sorted(IDENTITY.items())).encode(), digest_size=16).digest()
    # The first call connects as well; nothing waits for this program, as an engine's step would.
    with Client(label="examples/client.py", timeout_s=10) as client:
        space = client.namespace(digest, RECORD_BYTES, len(hashes[0]), BLOCK_TOKENS, IDENTITY)
        try:
            found = client.lookup([space], hashes, ticket=time.monotonic_ns(), tokens=len(PROMPT))
        except Unavailable as error:
            print(f"no daemon, so everything is computed: {error}")
            return 1
        print(f"{found} of {len(hashes)} blocks are held")

        into = [bytearray(RECORD_BYTES) for _ in range(found)]
        loaded = client.get(
            space, hashes[:found], into, wait_s=1.0
        )  # less, where a block was evicted meanwhile
        assert all(into[number] == computed(number) for number in range(loaded))

        missing = hashes[loaded:]
        parent = hashes[loaded - 1] if loaded else b""
        new = [computed(number) for number in range(loaded, len(hashes))]
        print(f"{loaded} loaded, {client.put(space, missing, parent, new)} computed and stored")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
