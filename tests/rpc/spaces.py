"""A namespace of a test, and records in and out of it, by a client that knows the reflection service only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import xxhash

from kvstore.ledger.vllm_hash import ALGORITHMS, DEFAULT_SEED
from tests.rpc.reflecting import Reflecting

HASH_BYTES, BLOCK_TOKENS = 32, 16


class Space:
    """A namespace of a test, registered through the door."""

    def __init__(
        self,
        client: Reflecting,
        model: str,
        record_bytes: int = 40_000,
        tenant: str = "",
        columns: Any = (),
        group: str = "0",
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.client = client
        self.record_bytes, self.columns = record_bytes, list(columns)
        self.digest = hashlib.blake2b(f"{model}/{tenant}/{group}".encode(), digest_size=16).digest()
        self.selector = {"digest": self.digest.hex()}
        seed = hashlib.sha256(ALGORITHMS["sha256"](DEFAULT_SEED)).hexdigest()[:32]
        client(
            "CacheService/RegisterNamespace",
            namespace={
                "digest": self.digest,
                "record_bytes": record_bytes,
                "hash_bytes": HASH_BYTES,
                "block_tokens": block_tokens,
                "fields": {
                    "model": model,
                    "weights": model,
                    "tenant": tenant,
                    "group": group,
                    "hash": "sha256",
                    "hash seed": seed,
                },
                "columns": self.columns,
            },
        )

    def record(self, number: int) -> bytes:
        return number.to_bytes(4, "little") * (self.record_bytes // 4)

    def sums(self, record: bytes) -> bytes:
        at, digests = 0, b""
        for size in self.columns or [len(record)]:
            digests += xxhash.xxh3_128_digest(record[at : at + size])
            at += size
        return digests

    def pieces(
        self, index: int, record: bytes, piece_bytes: int = 16_384, sums: bytes = b""
    ) -> Iterator[dict[str, Any]]:
        for at in range(0, len(record), piece_bytes):
            first = {"checksums": sums or self.sums(record)} if not at else {}
            yield {"index": index, "offset": at, "data": record[at : at + piece_bytes], **first}

    def start(self, hashes: list[bytes], parent: bytes = b"") -> dict[str, Any]:
        return {"start": {"namespace": self.selector, "hashes": b"".join(hashes), "parent": parent}}

    def put(self, hashes: list[bytes], records: list[bytes], parent: bytes = b"") -> tuple[Any, Any]:
        """(wanted, stored)"""

        def messages() -> Iterator[dict[str, Any]]:
            yield self.start(hashes, parent)
            for index in coming.get().indexes:
                yield from self.pieces(index, records[index])

        coming = SimpleQueue[Any]()
        answers = self.client.start("CacheService/Put", messages())
        wanted = next(answers).wanted
        coming.put(wanted)
        (last,) = list(answers)
        return wanted, last.stored

    def get(self, hashes: list[bytes], **more: Any) -> tuple[int, list[bytes]]:
        """How many seemed to come, and the records."""
        answers = self.client.start(
            "CacheService/Get", [{"namespace": self.selector, "hashes": b"".join(hashes), **more}]
        )
        held = next(answers).held
        records: list[bytes] = []
        for answer in answers:
            if answer.offset == 0:
                assert answer.index == len(records)
                records.append(b"")
                checksums = answer.checksums
            assert answer.offset == len(records[-1])
            records[-1] += answer.data
            if len(records[-1]) == self.record_bytes:
                assert checksums == self.sums(records[-1])
        return held, records


def named(count: int, salt: str) -> list[bytes]:
    return [hashlib.sha256(f"{salt} {number}".encode()).digest() for number in range(count)]
