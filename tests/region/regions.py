"""Deployments of regions for tests: files of regions over directories or a real S3 server, and clients whose bytes anybody can check."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.client import Client, Namespace
from tests.objects import S3Server
from tests.running import Place, kvstore

RECORD_BYTES = 64 * 1024
HASH_BYTES = 32
BLOCK_TOKENS = 64  # four blocks a granule
STORES = ["s3", *(["file"] if "ROUNDS" in os.environ else [])]  # of buckets: both in `make soak`
S3_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def regions_file(path: Path, *names: str, s3: S3Server | None = None, rules: str = "") -> Path:
    """A file of regions below this directory, whose buckets exist and are no regions yet."""
    lines = ['deployment = "acme"']
    for name in names:
        if s3 is None:
            (path / name).mkdir()
            lines += [f"[regions.{name}]", f'url = "file://{path / name}"']
        else:
            bucket = f"{name}-{random.SystemRandom().getrandbits(40):010x}"
            s3.make_bucket(bucket)
            lines += [f"[regions.{name}]", f'url = "s3://{bucket}/kv"', f'endpoint = "{s3.endpoint}"']
    file = path / "regions.toml"
    file.write_text("\n".join([*lines, rules, ""]))
    return file


def init(file: Path, *names: str) -> None:
    for name in names:
        made = kvstore("region", "init", name, "--regions", file, **S3_KEYS)
        assert made.returncode == 0, made.stderr


def arguments(place: Place, file: Path, region: str, *more: str) -> list[str]:
    """Of `serve`: a daemon of a region."""
    return [*place.arguments, f"--set=regions_file={file}", f"--set=region={region}", *more]


def chain(seed: object, count: int) -> list[bytes]:
    return [random.Random(f"{seed}/{depth}").randbytes(HASH_BYTES) for depth in range(count)]


def content(block_hash: bytes) -> bytes:
    return block_hash * (RECORD_BYTES // HASH_BYTES)


def space_of(client: Client, tenant: str = "") -> Namespace:
    digest = b"tests of regions" if not tenant else tenant.encode().ljust(16, b".")
    return client.namespace(
        digest, RECORD_BYTES, HASH_BYTES, BLOCK_TOKENS, {"model": "a model", "tenant": tenant}
    )


def store(client: Client, space: Namespace, hashes: Sequence[bytes]) -> None:
    assert client.put(space, hashes, b"", list(map(content, hashes))) == len(hashes)


def read(client: Client, space: Namespace, hashes: Sequence[bytes]) -> int:
    """How many leading blocks came back; each is right."""
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    got = client.get(space, hashes, into, 10.0)
    for block_hash, data in zip(hashes[:got], into, strict=False):
        assert data == content(block_hash), "a wrong byte"
    return got


def until(true: Callable[[], Any], within_s: float = 30.0) -> None:
    """Wait for something that takes a while."""
    give_up_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.05)


def status(client: Client) -> dict[str, Any]:
    """The part about the region."""
    found = client.status()["region"]
    assert found
    return found
