"""An object of any name takes nothing from the list of a bucket: others write there, too, and by mistake."""

from __future__ import annotations

import asyncio
import sys
from http.client import HTTPConnection
from urllib.parse import quote

import pytest

from tests.objects import S3Server
from tests.running import TIMEOUT_S
from tiers.bucket import plain_lists
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectRefused

NAMES = [f"a/{number:04}" for number in range(12)]
ODD = (
    "a//x",
    "a/0005//x",
    "a/../x",
    "a/./x",
    "a/..",
    "a/\x01x",
    "a/0007\x1f",
    "a//",
    "a/b c/",
    "/a/x",
    "a/0011//",
)


def _put(server: S3Server, key: str) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request("PUT", f"/kvstore/{quote(key)}", b"")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


async def _listed(objects: Objects, after: str = "") -> list[ObjectInfo]:
    return [info async for page in objects.list("a/", after) for info in page]


def test_no_name_ends_a_list(s3_server: S3Server) -> None:
    """Wherever it lies; what is said of the others is what was said before, and folders are what they were."""

    async def main() -> None:
        objects = open_objects("s3://kvstore/odd", s3_server.options())
        for name in NAMES:
            await objects.put(name, name.encode())
        await objects.put("a/f/x", b"")
        before = await _listed(objects)
        for odd in ODD:
            _put(s3_server, f"odd/{odd}")
            found = await _listed(objects)
            assert [info for info in found if info in before] == before, odd
            assert [info for info in await _listed(objects, NAMES[7]) if info in before] == before[8:], odd
            assert set(NAMES) < {info.name for info in found}
        folders = await objects.folders("a/")
        assert "f" in folders
        for folder in folders:  # each can be listed
            assert {info.name async for page in objects.list(f"a/{folder}/") for info in page}

    asyncio.run(main())


def test_without_boto3_it_is_said_what_is_wrong(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to do, in the one line that problems have."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    plain_lists._client.cache_clear()

    async def main() -> None:
        objects = open_objects("s3://kvstore/without", s3_server.options())
        await objects.put("a/x", b"")
        _put(s3_server, "without/a//x")
        for work in (_listed(objects), objects.folders("a/")):
            with pytest.raises(ObjectRefused, match=r"a name there can be none of ours .*kvstore-llm\[s3\]"):
                await work

    asyncio.run(main())
