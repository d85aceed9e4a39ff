"""An engine that stores and loads all the time: new prompts, and again those of the last minutes, wherever they are by now.

    a new prompt ─▶ lookup, put ─╮
    an older one ─▶ lookup, get ─┴─▶ a few of each a second, each byte compared; what is not found is put again, as an engine would

The daemon may be away, hang or be stopped: calls fail, and are made again.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvstore.client import Client, Namespace
from kvstore.errors import ClientError

RECORD_BYTES, HASH_BYTES, BLOCK_TOKENS, BLOCKS = 64 * 1024, 32, 64, 8
WARM_PROMPTS = 48  # stored at once: 24 MiB, more than DRAM has
KNOWN_PROMPTS = 96  # the latest, of which older ones are asked for
PAUSE_S = 0.3
FIELDS = {
    "model": "Qwen/Qwen3-32B",
    "tenant": "acme",
    "dtype": "bfloat16",
    "hash": "sha256",
    "hash seed": "0",
}


class WrongByte(Exception):
    """An engine got other bytes than were stored."""


class Traffic:
    """Of one engine. prompts: seeds of the latest, which another engine may be asked for, too."""

    def __init__(
        self, socket: Path, fields: Mapping[str, str] = FIELDS, after: Traffic | None = None
    ) -> None:
        """after: another one, whose older prompts are all that is asked for."""
        self.prompts: list[int] = []
        self.failure: Exception | None = None
        self.warm = threading.Event()
        self._socket = socket
        self._fields = dict(fields)
        self._after = after
        self._end = threading.Event()
        self._chance = random.Random(7)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ticket = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                with suppress(ClientError), Client(str(self._socket), timeout_s=3.0, label="drill") as client:
                    self._serve(client)
                self._end.wait(PAUSE_S)
        except WrongByte as error:
            self.failure = error

    def _serve(self, client: Client) -> None:
        digest = hashlib.blake2b(repr(sorted(self._fields.items())).encode(), digest_size=16).digest()
        space = client.namespace(digest, RECORD_BYTES, HASH_BYTES, BLOCK_TOKENS, self._fields)
        fresh = iter(range(self._chance.randrange(1 << 40), 1 << 62))
        while not self._end.is_set():
            if self._after is not None:
                for seed in self._after.prompts[-8:]:
                    self._ask(client, space, seed)
            else:
                while len(self.prompts) < WARM_PROMPTS:
                    self._ask(client, space, next(fresh))
                self.warm.set()
                self._ask(client, space, next(fresh))
                for seed in self._chance.choices(self.prompts, k=3):
                    self._ask(client, space, seed)
            self._end.wait(PAUSE_S)

    def _ask(self, client: Client, space: Namespace, seed: int) -> None:
        chance = random.Random(seed)
        hashes = [chance.randbytes(HASH_BYTES) for _ in range(BLOCKS)]
        self._ticket += 1
        found = client.lookup([space], hashes, ticket=self._ticket, tokens=BLOCKS * BLOCK_TOKENS)
        into = [bytearray(RECORD_BYTES) for _ in hashes[:found]]
        got = client.get(space, hashes[:found], into, 2.0) if found else 0
        for block_hash, data in zip(hashes[:got], into, strict=False):
            if data != _content(block_hash):
                raise WrongByte(f"a block of prompt {seed}")
        if got < BLOCKS and self._after is None:
            parent = hashes[got - 1] if got else b""
            client.put(space, hashes[got:], parent, list(map(_content, hashes[got:])))
        if self._after is None and (not self.prompts or seed not in self.prompts):
            self.prompts.append(seed)
            del self.prompts[:-KNOWN_PROMPTS]


def _content(block_hash: bytes) -> bytes:
    return block_hash * (RECORD_BYTES // HASH_BYTES)
