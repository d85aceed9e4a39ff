"""One client under load, as a process to kill: stores chains of blocks and reads them back.

    python -m tests.kill.load SOCKET LEDGER SEED

Every block's bytes follow from its hash, so anybody can tell a wrong byte. The ledger has
one line per chain of which the daemon acknowledged blocks; a line is written only after
the acknowledgement, so what it says must be true whatever is killed afterwards. A wrong
byte ends the process with status 3.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from kvstore.client import Client, Namespace
from kvstore.errors import ClientError

RECORD_BYTES = 96 * 1024
HASH_BYTES = 32
CHAIN_BLOCKS = 12
DIGEST = b"kill-loop-tests!"


def namespace(client: Client) -> Namespace:
    return client.namespace(DIGEST, RECORD_BYTES, HASH_BYTES, 32, {"model": "kill loop"})


def chain(seed: int) -> list[bytes]:
    return [random.Random(f"{seed}/{depth}").randbytes(HASH_BYTES) for depth in range(CHAIN_BLOCKS)]


def content(block_hash: bytes) -> bytes:
    return block_hash * (RECORD_BYTES // HASH_BYTES)


def read_back(client: Client, space: Namespace, seed: int, count: int) -> int:
    """How many leading blocks came back; exits with status 3 at a wrong byte."""
    hashes = chain(seed)[:count]
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    got = client.get(space, hashes, into, 5.0)
    for block_hash, data in zip(hashes[:got], into, strict=False):
        if data != content(block_hash):
            print(f"wrong byte in chain {seed}", flush=True)
            sys.exit(3)
    return got


def main(socket: str, ledger: str, seed: str) -> None:
    client = Client(socket, timeout_s=5.0, label="load")
    space = namespace(client)
    chance = random.Random(seed)
    number = int(seed) * 1000
    stored: list[tuple[int, int]] = []
    out = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    print("loading", flush=True)
    for _ in range(100_000):  # bounded: killed long before
        try:
            number += 1
            hashes = chain(number)
            count = client.put(space, hashes, b"", [content(h) for h in hashes])
            if count:
                os.write(out, f"{number} {count}\n".encode())
                stored.append((number, count))
            if stored:
                read_back(client, space, *chance.choice(stored))
        except ClientError:
            time.sleep(0.01)  # the daemon is dead or full: an engine would go on computing
        time.sleep(0.01)


def ledger_lines(path: Path) -> list[tuple[int, int]]:
    """(chain, blocks acknowledged) of all complete lines."""
    text = path.read_text() if path.exists() else ""
    return [
        (int(a), int(b))
        for a, b in (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
