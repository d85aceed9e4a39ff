"""Requests to a store have time for their bytes, and no more."""

from __future__ import annotations

import asyncio

import pytest

from tests.tiers.test_objects import FOUND, opened, run, server
from tiers.errors import ObjectUnavailable


async def flows(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """400,000 bytes, each 100,000 of them a moment later."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = b"206 Partial Content" if b"ange:" in head else b"200 OK"
    found = FOUND.split(b"Connection")[0].replace(b"200 OK", status).replace(b"Length: 5", b"Length: 400000")
    writer.write(found + b"Content-Range: bytes 0-399999/400000\r\nConnection: close\r\n\r\n")
    for _ in range(4):
        await asyncio.sleep(0.3)
        writer.write(bytes(100_000))
        await writer.drain()


@pytest.mark.parametrize("how", ["get", "get_ranges"])
def test_an_attempt_has_time_for_its_bytes(how: str) -> None:
    """What flows at an acceptable speed takes longer than the timeout, and comes; at a speed that is none it does not."""

    async def work() -> None:
        async with server(flows) as endpoint:
            for least_bytes_per_s, comes in ((10_000.0, True), (1e9, False)):
                objects = opened(endpoint, timeout_s=0.8, retries_max=0, least_bytes_per_s=least_bytes_per_s)
                call = objects.get("a") if how == "get" else objects.get_ranges("a", [(0, 400_000)])
                if comes:
                    found = await call
                    assert len(found if how == "get" else found[0]) == 400_000
                else:
                    with pytest.raises(ObjectUnavailable, match="time"):
                        await call

    run(work())
