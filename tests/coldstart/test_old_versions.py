"""Old versions of what is erased leave a bucket that keeps them, and nothing else does; against moto."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import boto3
import pytest

from coldstart.fleet.bucket_admin import Bucket
from coldstart.fleet.old_versions import delete_old
from replication.formats.tombstones import Tombstone
from tests.objects import S3Server
from tests.region.regions import S3_KEYS
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PackHeader

RECORD = b"a record" * 8
SPECS = {
    name: NamespaceSpec(digest(name.encode()), len(RECORD), 16, 16, {"tenant": name})
    for name in ("acme", "other")
}


def header(tenant: str, number: int) -> PackHeader:
    return PackHeader(SPECS[tenant], b"", digest(f"{tenant} {number}".encode()), digest(RECORD))


@pytest.fixture(params=["plain", "sealed"])
def way(
    request: pytest.FixtureRequest, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Bucket, Objects]:
    """A bucket with versions, as boto3, the administrator and a region have it."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
    name = f"versions-{request.param}-{random.SystemRandom().getrandbits(40):010x}"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)  # which has versions
    objects = open_objects(f"s3://{name}/kv", s3_server.options(path_style=True))
    if request.param == "sealed":
        objects = SealedObjects(objects, Seals([b"k" * 32]), "acme/na")
    return client, Bucket(f"s3://{name}/kv", s3_server.options(path_style=True)), objects


def versions(client: Any, bucket: Bucket) -> dict[str, int]:
    """How many versions each object has."""
    found: dict[str, int] = {}
    for page in client.get_paginator("list_object_versions").paginate(
        Bucket=bucket.where.removeprefix("s3://")
    ):
        for one in page.get("Versions", ()):
            found[one["Key"]] = found.get(one["Key"], 0) + 1
    return found


@pytest.mark.parametrize(
    "erased",
    [
        Tombstone(tenant="acme", watched_until_s=9),
        Tombstone(namespaces=(SPECS["acme"].digest,), watched_until_s=9),
        Tombstone(tenant="acme", block_hash=b"b" * 16, watched_until_s=9),
    ],
    ids=["tenant", "namespace", "prefix"],
)
def test_what_is_deleted_of_whom_is_erased_has_no_versions(
    way: tuple[Any, Bucket, Objects], erased: Tombstone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions of packs that were deleted go, over many pages; what lives, what is another's and what is no pack stays. What is locked
    stays, too, and is said with the reason."""
    client, bucket, objects = way
    name = bucket.where.removeprefix("s3://")
    monkeypatch.setattr("coldstart.fleet.old_versions.DELETED_TOGETHER", 2)

    async def fill() -> dict[str, list[str]]:
        names = {
            tenant: [
                (await put_pack(objects, header(tenant, number), [memoryview(RECORD)])).name
                for number in range(7)
            ]
            for tenant in SPECS
        }
        await put_pack(objects, header("acme", 6), [memoryview(RECORD)])  # another version of one that lives
        await objects.put("nodes/one", b"one")
        await objects.delete([*names["acme"][:5], names["other"][0], "nodes/one"])
        return names

    names = asyncio.run(fill())
    client.put_object_retention(
        Bucket=name, Key=f"kv/{names['acme'][0]}", VersionId=_version(client, name, f"kv/{names['acme'][0]}"),
        Retention={"Mode": "COMPLIANCE", "RetainUntilDate": "2099-01-01T00:00:00Z"},
    )  # fmt: skip
    left = delete_old(bucket, objects, erased)
    assert left.startswith("1 old versions cannot be deleted: AccessDenied")
    there = versions(client, bucket)
    gone = {f"kv/{one}" for one in names["acme"][1:5]}
    assert (
        not gone & there.keys() and len(there) == 14 + 1 - len(gone) and there[f"kv/{names['acme'][6]}"] == 2
    )
    assert client.get_object(Bucket=name, Key=f"kv/{names['acme'][5]}")["ContentLength"]
    for one in names["acme"][:5]:
        with pytest.raises(client.exceptions.NoSuchKey):
            client.get_object(Bucket=name, Key=f"kv/{one}")


def _version(client: Any, bucket: str, key: str) -> str:
    [found] = client.list_object_versions(Bucket=bucket, Prefix=key)["Versions"]
    return str(found["VersionId"])
