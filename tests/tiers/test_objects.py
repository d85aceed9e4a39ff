"""Stores of objects: one suite for all of them, and how the real ones behave when their server does not."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objects import Faults, FaultyObjects, MemoryObjects, S3Server
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import OBJECT_GAP_BYTES, open_objects
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused, ObjectUnavailable

T = TypeVar("T")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STORES = ("ours", "memory", "file", "s3", "faultless")
SECRET = "s3cr3tK3y"
_fresh = itertools.count()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture(params=STORES)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Objects]:
    """Opens an empty store of one kind, as often as it is called."""

    def of(kind: str) -> Objects:
        number = next(_fresh)
        if kind == "ours":
            return MemoryObjects(page_names=7)
        if kind == "memory":
            return open_objects(f"memory://conformance{number}")
        if kind == "file":
            return open_objects(f"file://{tmp_path}/{number}", ObjectOptions(create=True))
        if kind == "s3":
            server: S3Server = request.getfixturevalue("s3_server")
            return open_objects(f"s3://kvstore/conformance/{number}-{os.getpid()}", server.options())
        return FaultyObjects(MemoryObjects(), random.Random(0))

    return lambda: of(request.param)


async def names_of(objects: Objects, prefix: str = "", after: str = "") -> list[str]:
    return [info.name async for page in objects.list(prefix, after) for info in page]


# -- what every store does --


def test_what_was_put_is_got(fresh: Callable[[], Objects]) -> None:
    """An object comes back as it was put, whatever kind of buffer it came in, and however large it is."""

    async def work() -> None:
        objects = fresh()
        for number, content in enumerate((b"", b"x", random.Random(1).randbytes(3 << 20))):
            for kind in (bytes, bytearray, memoryview):
                assert await objects.put(f"a/{number}", kind(content))
                assert bytes(await objects.get(f"a/{number}")) == content
                info = await objects.head(f"a/{number}")
                assert (info.name, info.size_bytes) == (f"a/{number}", len(content))

    run(work())


def test_a_buffer_may_be_used_again(fresh: Callable[[], Objects]) -> None:
    """Changing a buffer after it was put does not change the object."""

    async def work() -> None:
        objects, buffer = fresh(), bytearray(b"before")
        await objects.put("a", buffer)
        buffer[:] = b"after!"
        assert bytes(await objects.get("a")) == b"before"

    run(work())


def test_only_new_changes_nothing(fresh: Callable[[], Objects]) -> None:
    """only_new says whether the object is new, and leaves one that is there; without it the last one wins."""

    async def work() -> None:
        objects = fresh()
        assert await objects.put("a", b"1", only_new=True)
        assert not await objects.put("a", b"2", only_new=True)
        assert bytes(await objects.get("a")) == b"1"
        assert await objects.put("a", b"3")
        assert bytes(await objects.get("a")) == b"3"

    run(work())


def test_a_replaced_object_has_another_tag(fresh: Callable[[], Objects]) -> None:
    """The ETag is the same in `head` and `list`, and another one behind a put of something else."""

    async def work() -> None:
        objects = fresh()
        await objects.put("heads/w", b"1")
        first = await objects.head("heads/w")
        assert [info async for page in objects.list("heads/") for info in page] == [first]
        await objects.put("heads/w", b"2")
        assert first.e_tag and (await objects.head("heads/w")).e_tag != first.e_tag

    run(work())


def test_ranges_are_exact(fresh: Callable[[], Objects]) -> None:
    """Ranges come back in the order asked for: neighbours, far apart, overlapping, twice, empty."""
    content = random.Random(2).randbytes(4 * OBJECT_GAP_BYTES)
    far = 3 * OBJECT_GAP_BYTES
    cases = [
        [(0, 10)],
        [(10, 20), (0, 10)],
        [(0, 10), (far, far + 5), (5, 7)],
        [(5, 9), (5, 9), (0, len(content))],
        [(3, 3), (len(content) - 1, len(content))],
        [],
    ]

    async def work() -> None:
        objects = fresh()
        await objects.put("a", content)
        for ranges in cases:
            parts = await objects.get_ranges("a", ranges)
            assert [bytes(part) for part in parts] == [content[start:end] for start, end in ranges]

    run(work())


@pytest.mark.parametrize("ranges", [[(5, 11)], [(10, 12)], [(20, 30)], [(0, 2), (5, 11)]])
def test_no_range_is_cut_off(fresh: Callable[[], Objects], ranges: list[tuple[int, int]]) -> None:
    """A range beyond the end of the object is an error, never a shorter part."""

    async def work() -> None:
        objects = fresh()
        await objects.put("a", b"0123456789")
        with pytest.raises(ObjectDamaged, match="a"):
            await objects.get_ranges("a", ranges)

    run(work())


def test_what_is_not_there(fresh: Callable[[], Objects]) -> None:
    """Reading what is not there is ObjectMissing, a list of it is empty, deleting it is no error."""

    async def work() -> None:
        objects = fresh()
        await objects.put("a/b", b"1")
        for missing in ("c", "a/c", "a/b.c"):
            for call in (objects.get(missing), objects.head(missing), objects.get_ranges(missing, [(0, 1)])):
                with pytest.raises(ObjectMissing, match=missing):
                    await call
        await objects.delete([])
        await objects.delete(["c", "a/b", "a/c"])
        assert (
            await names_of(objects) == [] == await names_of(objects, "a/") == list(await objects.folders(""))
        )

    run(work())


def test_lists_are_in_order(fresh: Callable[[], Objects]) -> None:
    """A list is ordered by name over folders and pages, goes on behind any name, and knows whole folders only."""
    names = sorted(
        [f"a/{n:03}/{n % 3}" for n in range(30)] + ["a-b/c", "a.b", "a/b.c", "a0", "ab/c", "b/a/c"]
    )

    async def work() -> None:
        objects = fresh()
        await asyncio.gather(
            *(objects.put(name, name.encode()) for name in random.Random(3).sample(names, len(names)))
        )
        for prefix in ("", "a/", "a/007/", "b/", "c/"):
            expected = [name for name in names if name.startswith(prefix)]
            assert await names_of(objects, prefix) == expected
            for after in ("a/007/1", "a/007", "a/b", "a/zz", "b/a/c", "zz"):
                assert await names_of(objects, prefix, after) == [name for name in expected if name > after]
        assert list(await objects.folders("")) == ["a", "a-b", "ab", "b"]
        assert list(await objects.folders("b/")) == ["a"]
        assert list(await objects.folders("c/")) == []

    run(work())


def test_many_at_once(fresh: Callable[[], Objects]) -> None:
    """Hundreds of calls at once all come back, more than may be under way together."""

    async def work() -> None:
        objects = fresh()
        await asyncio.gather(*(objects.put(f"a/{n}", str(n).encode()) for n in range(200)))
        found = await asyncio.gather(*(objects.get(f"a/{n}") for n in range(200)))
        assert [int(bytes(content)) for content in found] == list(range(200))

    run(work())


def test_works_on_uvloop(fresh: Callable[[], Objects]) -> None:
    """A store works on uvloop as well."""

    async def work() -> None:
        objects = fresh()
        assert await objects.put("a", b"1") and bytes(await objects.get("a")) == b"1"
        assert await names_of(objects) == ["a"]

    uvloop.run(work())


NAMES = st.sampled_from(["a", "b", "a.c", "d/a", "d/b", "d/e/a", "d-e/a", "f/0001", "f/0002", "f/0010"])
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.binary(max_size=20)),
    st.tuples(st.just("new"), NAMES, st.binary(max_size=20)),
    st.tuples(st.just("delete"), st.lists(NAMES, max_size=4), st.none()),
    st.tuples(st.just("read"), NAMES, st.tuples(st.integers(0, 20), st.integers(0, 20))),
    st.tuples(
        st.just("list"), st.sampled_from(["", "d/", "d/e/", "f/", "g/"]), st.one_of(st.just(""), NAMES)
    ),
)


@settings(max_examples=25)
@given(steps=st.lists(STEPS, max_size=25))
def check_against_a_dict(fresh: Callable[[], Objects], steps: list[tuple[str, Any, Any]]) -> None:
    async def work() -> None:
        objects, model = fresh(), dict[str, bytes]()
        for kind, subject, more in steps:
            if kind in ("put", "new"):
                is_new = kind == "put" or subject not in model
                assert await objects.put(subject, more, only_new=kind == "new") == is_new
                model[subject] = more if is_new else model[subject]
            elif kind == "delete":
                await objects.delete(subject)
                for name in subject:
                    model.pop(name, None)
            elif kind == "read":
                await check_reads(objects, model, subject, *sorted(more))
            else:
                await check_lists(objects, model, subject, more)

    run(work())


async def check_reads(objects: Objects, model: dict[str, bytes], name: str, start: int, end: int) -> None:
    if name not in model:
        with pytest.raises(ObjectMissing):
            await objects.get(name)
        return
    assert bytes(await objects.get(name)) == model[name]
    if start < end <= len(model[name]):
        (part,) = await objects.get_ranges(name, [(start, end)])
        assert bytes(part) == model[name][start:end]


async def check_lists(objects: Objects, model: dict[str, bytes], prefix: str, after: str) -> None:
    listed = [(info.name, info.size_bytes) async for page in objects.list(prefix, after) for info in page]
    below = [name for name in sorted(model) if name.startswith(prefix)]
    assert listed == [(name, len(model[name])) for name in below if name > after]
    folders = {name[len(prefix) :].split("/")[0] for name in below if "/" in name[len(prefix) :]}
    assert list(await objects.folders(prefix)) == sorted(folders)


def test_behaves_as_a_dict(fresh: Callable[[], Objects]) -> None:
    """Any sequence of puts, reads, lists and deletes gives what it would give with a dict."""
    check_against_a_dict(fresh)


# -- the fault store itself, which other tests trust --


def test_faults_are_as_announced() -> None:
    """Each fault of the fault store happens as often as its share says, and does what it says, the same for a seed."""

    async def work(seed: int) -> tuple[list[str], dict[str, int]]:
        faults = Faults(
            failed=0.1, lost=0.1, late=0.1, twice=0.1, rotten=0.1, truncated=0.1, flipped=0.1, late_s=0.01
        )
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(seed), faults)
        seen = []
        for number in range(300):
            try:
                seen.append(str(await objects.put(f"a{number}", bytes(64))))
            except ObjectUnavailable as error:
                seen.append(str(error).split(": ")[2])
        await objects.settle()
        stored = [f"a{number}" in inner.stored for number in range(300)]
        done = {
            what: {is_there for is_there, was in zip(stored, seen, strict=True) if was == what}
            for what in set(seen)
        }
        assert done["failed (injected)"] == {False} and done["timed out (injected)"] == {True}
        assert done["the answer was lost (injected)"] == {True} == done["True"]
        damaged = [content for content in inner.stored.values() if content != bytes(64)]
        assert 10 < len(damaged) <= objects.injected["rotten"]
        objects.faults = Faults(truncated=0.2, flipped=0.2)
        await inner.put("b", bytes(64))
        reads = [bytes(await objects.get("b")) for _ in range(300)]
        assert 30 < sum(len(content) < 64 for content in reads) < 100
        assert 30 < sum(sum(content) > 0 for content in reads) < 100
        return seen, dict(objects.injected)

    assert run(work(1)) == run(work(1)) != run(work(2))


# -- servers that misbehave --


def answer(status: str, body: str = "", more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n{body}".encode()
    )


def problem(code: str) -> str:
    """S3's XML for an error, with everything echoed that a server could echo."""
    return (
        f"<Error><Code>{code}</Code><Message>{SECRET}</Message><StringToSign>{SECRET}</StringToSign></Error>"
    )


def says(*answers: bytes) -> tuple[Answer, list[bytes]]:
    """Gives one answer after the other, and the last one for ever; and the first lines of what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[min(len(asked), len(answers) - 1)])
        asked.append(head.split(b"\r\n")[0])

    return serve, asked


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(FOUND.split(b"Connection")[0].replace(b"Length: 5", b"Length: 5000") + b"\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


FOUND = answer("200 OK", "hello", 'ETag: "1"\r\nLast-Modified: Mon, 23 Nov 2026 12:00:00 GMT\r\n')
CUT_OFF = FOUND.replace(b"Length: 5", b"Length: 9")


@asynccontextmanager
async def server(serve: Answer) -> AsyncIterator[str]:
    """The endpoint of a server that treats each connection so, and closes it."""
    tasks = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await serve(reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client had enough, or the test is over
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[arg-type]  # no task is None


def opened(endpoint: str, **options: Any) -> Objects:
    given = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "allow_http": True,
        "access_key_id": "key",
        "secret_access_key": SECRET,
        "timeout_s": 20.0,
        "deadline_s": 60.0,
        "retries_max": 2,
        "backoff_s_min": 0.01,
        **options,
    }
    return open_objects("s3://bucket/pre/fix", ObjectOptions(**given), random.Random(0))


def calls(objects: Objects) -> list[Coroutine[Any, Any, Any]]:
    """One of each kind."""

    async def listed() -> None:
        async for _ in objects.list("a/"):
            pass

    return [
        objects.get("a/b"),
        objects.get_ranges("a/b", [(0, 5)]),
        objects.head("a/b"),
        objects.put("a/b", b"hello"),
        objects.put("a/b", b"hello", only_new=True),
        listed(),
        objects.folders("a/"),
        objects.delete(["a/b"]),
    ]


async def errors_of(objects: Objects) -> list[ObjectError]:
    """What each kind of call raises, which it must."""
    found = []
    for call in calls(objects):
        with pytest.raises(ObjectError) as caught:
            await call
        found.append(caught.value)
    return found


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (answer("503 Slow Down", problem("SlowDown")), ObjectUnavailable, "503"),
        (answer("500 Internal Server Error", problem("InternalError")), ObjectUnavailable, "500"),
        (answer("403 Forbidden", problem("SignatureDoesNotMatch")), ObjectRefused, "403"),
        (answer("401 Unauthorized", problem("InvalidToken")), ObjectRefused, "401"),
        (answer("400 Bad Request", problem("AuthorizationHeaderMalformed")), ObjectRefused, "400"),
        (answer("301 Moved Permanently", problem("PermanentRedirect")), ObjectRefused, "another region"),
        (b"", ObjectUnavailable, "broke the connection off"),
        (b"nonsense\r\n\r\n", ObjectUnavailable, ""),
    ],
    ids=lambda value: value[:12].decode() if isinstance(value, bytes) else "",
)
def test_answers_are_mapped(said: bytes, kind: type[ObjectError], words: str) -> None:
    """Every call fails as the server's answer says: refused at once, or unavailable after the retries; in one line
    that names the store and the object, in which nothing stands that the server echoed."""

    async def work() -> None:
        serve, asked = says(said)
        async with server(serve) as endpoint:
            for error in await errors_of(opened(endpoint)):
                assert type(error) is kind and words in str(error), error
                assert "s3://bucket/pre/fix: " in str(error) and " a/" in str(error)
                assert "\n" not in str(error) and SECRET not in "".join(traceback.format_exception(error))
        assert len(asked) == 8 * (3 if kind is ObjectUnavailable else 1)

    run(work())


def test_no_bucket_is_refused_and_no_object_is_missing() -> None:
    """404 is ObjectRefused where the server says that the bucket is not there, and ObjectMissing for a read otherwise."""

    async def work() -> None:
        serve, _ = says(answer("404 Not Found", problem("NoSuchBucket")))
        async with server(serve) as endpoint:
            errors = await errors_of(opened(endpoint))
            assert [type(error) for error in errors[:2] + errors[3:]] == [ObjectRefused] * 7
            assert "no such bucket" in str(errors[0])
        serve, _ = says(answer("404 Not Found", problem("NoSuchKey")))
        async with server(serve) as endpoint:
            objects = opened(endpoint)
            for call in (objects.get("a"), objects.get_ranges("a", [(0, 5)]), objects.head("a")):
                with pytest.raises(
                    ObjectMissing, match=r"s3://bucket/pre/fix: .* a.*: there is no such object"
                ):
                    await call

    run(work())


@pytest.mark.parametrize("serve", [hangs, trickles])
def test_deadlines_hold(serve: Answer) -> None:
    """A server that never answers, or sends a byte now and then, costs one timeout for an attempt, and one deadline
    for a call, all attempts included."""

    async def work() -> None:
        async with server(serve) as endpoint:
            for options, low_s in (
                ({"timeout_s": 0.2, "retries_max": 0}, 0.2),
                ({"timeout_s": 3600.0, "deadline_s": 0.3}, 0.3),
                ({"timeout_s": 0.1, "deadline_s": 0.5, "retries_max": 1000}, 0.5),
            ):
                begun_s = time.monotonic()
                with pytest.raises(ObjectUnavailable, match=r"time|within"):
                    await opened(endpoint, **options).get("a")
                assert low_s - 0.05 <= time.monotonic() - begun_s <= 10.0
            begun_s = time.monotonic()
            slow = opened(endpoint, timeout_s=3600.0, deadline_s=0.3)
            found = await asyncio.gather(*calls(slow), return_exceptions=True)
            assert time.monotonic() - begun_s < 10.0
            assert serve is trickles or {type(error) for error in found} == {ObjectUnavailable}

    run(work())


def test_retries_help() -> None:
    """What fails twice and then works is a success: errors, connections that break, bodies that are cut off."""

    async def work() -> None:
        for first in (answer("503 Slow Down", problem("SlowDown")), b"", CUT_OFF):
            serve, asked = says(first, first, FOUND)
            async with server(serve) as endpoint:
                assert bytes(await opened(endpoint).get("a")) == b"hello"
                assert len(asked) == 3

    run(work())


def test_pauses_grow_and_are_jittered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause behind each attempt is drawn from zero to a limit that doubles, up to its maximum."""
    paused: list[float] = []

    async def pause(delay_s: float) -> None:
        paused.append(delay_s)

    async def work() -> None:
        serve, asked = says(answer("503 Slow Down"))
        async with server(serve) as endpoint:
            objects = opened(endpoint, retries_max=6, backoff_s_min=0.04, backoff_s_max=0.2)
            monkeypatch.setattr(asyncio, "sleep", pause)
            with pytest.raises(ObjectUnavailable):
                await objects.get("a")
            monkeypatch.undo()
        assert len(asked) == 7

    run(work())
    chance = random.Random(0)
    assert paused == [chance.random() * limit for limit in (0.04, 0.08, 0.16, 0.2, 0.2, 0.2)]


def test_requests_are_bounded() -> None:
    """However many calls are made, only so many requests are under way; the others wait within their deadline."""
    under_way, most = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        await reader.readuntil(b"\r\n\r\n")
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        writer.write(FOUND)

    async def work() -> None:
        async with server(serve) as endpoint:
            objects = opened(endpoint)
            found = await asyncio.gather(*(objects.get(f"a/{n}") for n in range(150)))
            assert {bytes(content) for content in found} == {b"hello"}

    run(work())
    assert 32 <= most <= 64


def test_a_lost_answer_is_no_conflict() -> None:
    """only_new whose first attempt was done but not answered is True: what is there is what was to be put; and False
    where something else is there."""

    async def work(content: bytes) -> bool:
        serve, _ = says(b"", answer("412 Precondition Failed", problem("PreconditionFailed")), FOUND)
        async with server(serve) as endpoint:
            return await opened(endpoint).put("a", content, only_new=True)

    assert run(work(b"hello"))
    assert not run(work(b"other"))


def test_stores_without_conditions() -> None:
    """A store that knows no conditional writes is asked first whether the object is there."""
    no = answer("501 Not Implemented", problem("NotImplemented"))

    async def work(*then: bytes) -> tuple[bool, list[bytes]]:
        serve, asked = says(no, *then)
        async with server(serve) as endpoint:
            return await opened(endpoint).put("a", b"hello", only_new=True), [
                line.split()[0] for line in asked
            ]

    assert run(work(answer("404 Not Found"), FOUND)) == (True, [b"PUT", b"HEAD", b"PUT"])
    assert run(work(FOUND)) == (False, [b"PUT", b"HEAD"])


def test_a_list_that_is_interrupted_goes_on() -> None:
    """A list whose second page fails is continued there: no name is left out and none comes twice."""

    def page(names: list[str], token: str) -> bytes:
        objects = "".join(
            f"<Contents><Key>pre/fix/{name}</Key><Size>1</Size><LastModified>2026-11-23T12:00:00Z</LastModified></Contents>"
            for name in names
        )
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
            if token
            else ""
        )
        return answer("200 OK", f"<ListBucketResult>{objects}{more}</ListBucketResult>")

    names = [f"a/{number:04}" for number in range(2500)]
    first, second, third = page(names[:1000], "t1"), page(names[1000:2000], "t2"), page(names[2000:], "")

    async def work() -> None:
        serve, asked = says(first, answer("503 Slow Down"), second, b"", third)
        async with server(serve) as endpoint:
            assert await names_of(opened(endpoint), "a/") == names
        assert (
            b"start-after=pre%2Ffix%2Fa%2F0999" in asked[2]
            and b"start-after=pre%2Ffix%2Fa%2F1999" in asked[4]
        )

    run(work())


# -- opening, and secrets --


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("bucket", {}, "no URL"),
        ("http://bucket/x", {}, "allowed are s3://"),
        (f"s3://key:{SECRET}@bucket/x", {}, "without user"),
        (f"https://key:{SECRET}@bucket/x", {}, "allowed are"),
        (f"s3://bucket/x?secret={SECRET}", {}, "without user"),
        ("s3://", {}, "allowed is s3://bucket"),
        ("s3://bucket/../x", {}, "allowed is s3://bucket"),
        ("s3://bucket", {"endpoint": "http://127.0.0.1:1"}, "allow_http"),
        ("s3://bucket", {"endpoint": f"https://key:{SECRET}@host"}, "without user"),
        ("s3://bucket", {"endpoint": "host:9000"}, "allowed is https"),
        ("gs://bucket", {"access_key_id": "key"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        *(
            (f"{scheme}://bucket/{prefix}", {}, f"allowed is {scheme}://bucket/prefix")
            for scheme in ("s3", "gs", "az")
            for prefix in ("a b", "a%20b", "é", "a//b", "a/./b", "a\nb", "a\u2028b", "é" * 3000)
        ),
        *((f"{scheme}://bucket/{'x' * 481}", {}, "at most 480") for scheme in ("s3", "gs", "az")),
        *((f"gs://{name}", {}, "3 to 222 of a-z") for name in ("Bucket", "bucket-")),
        *((f"az://{name}", {}, "3 to 63 of a-z") for name in ("a_container", "a--container")),
        ("az://container/a./b", {}, "end with a dot"),
        ("gs://bucket/.well-known/acme-challenge/x", {}, "Google keeps"),
        ("file://relative/x", {}, "absolute path"),
        ("file:///no/such/directory", {}, "no such directory"),
        ("file:///proc/x", {"create": True}, "file:///proc/x"),
    ],
)
def test_bad_places_are_refused(
    url: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL or an option that is wrong is refused when opened, in one line without credentials."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ObjectRefused) as caught:
        open_objects(url, ObjectOptions(secret_access_key=SECRET if url.startswith("az") else "", **options))
    assert words in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 300
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "..", "../a", "a/../../b", "a/.", "a b", "ä", "a#1", "a" * 2000]
)
def test_names_stay_inside(name: str, tmp_path: Path) -> None:
    """A name that could lead elsewhere, or that some store does not take, is refused, and nothing is touched."""

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}/inside", ObjectOptions(create=True))
        for call in (objects.put(name, b"x"), objects.get(name), objects.head(name), objects.delete([name])):
            with pytest.raises(ObjectRefused, match="is no name"):
                await call

    run(work())
    assert [path.name for path in tmp_path.rglob("*")] == ["inside"]


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """What the file system forbids is refused with its own words."""

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}")
        (tmp_path / "file").write_text("in the way")
        (tmp_path / "folder").mkdir()
        for name in ("file/below", "folder"):
            with pytest.raises(ObjectRefused, match="irectory"):
                await objects.put(name, b"x")

    run(work())


def test_secrets_stay_secret(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No repr, message, traceback or log has a secret, whether it came from the options or the environment, for S3 and
    Azure, whatever the server says."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    azure_key = "c2VjcmV0"  # base64, as Azure's are
    seen: list[str] = []

    async def work() -> None:
        statuses = (
            "403 Forbidden",
            "503 Slow Down",
            "400 Bad Request",
            "301 Moved",
            "200 OK",
            "404 Not Found",
        )
        for said in (
            *(answer(status, problem("Some")) for status in statuses),
            b"",
            SECRET.encode() + b"\r\n\r\n",
        ):
            serve, _ = says(said)
            async with server(serve) as endpoint:
                from_environment = {"access_key_id": "", "secret_access_key": ""}
                azure = ObjectOptions(
                    endpoint=endpoint,
                    allow_http=True,
                    access_key_id="account",
                    secret_access_key=azure_key,
                    retries_max=0,
                )
                for objects in (
                    opened(endpoint, retries_max=0, session_token=SECRET),
                    opened(endpoint, retries_max=0, **from_environment),
                    open_objects("az://container/x", azure),
                ):
                    seen.append(repr(objects))
                    for result in await asyncio.gather(*calls(objects), return_exceptions=True):
                        if isinstance(result, BaseException):
                            assert isinstance(result, ObjectError), result
                            seen.append("".join(traceback.format_exception(result)))

    run(work())
    seen += [repr(ObjectOptions(secret_access_key=SECRET, session_token=SECRET)), caplog.text]
    assert len(seen) > 100 and not [text for text in seen if SECRET in text or azure_key in text]


def test_credentials_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key in the options, the environment or from the machine, the message says so."""

    async def work() -> None:
        serve, _ = says(answer("404 Not Found"))
        async with server(serve) as machine:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                monkeypatch.delenv(name)
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", machine)
            objects = opened("http://127.0.0.1:1", access_key_id="", secret_access_key="", retries_max=0)
            with pytest.raises(ObjectUnavailable, match="s3://bucket/pre/fix: get a: no credentials"):
                await objects.get("a")

    run(work())


def test_two_openings_of_one_memory(tmp_path: Path) -> None:
    """Two openers of one memory:// name see the same objects, others do not."""

    async def work() -> None:
        name = f"memory://shared{next(_fresh)}"
        await open_objects(name).put("a", b"1")
        assert bytes(await open_objects(name).get("a")) == b"1"
        with pytest.raises(ObjectMissing):
            await open_objects(name + "x").get("a")

    run(work())


def test_a_process_ends_well(s3_server: S3Server) -> None:
    """A process that ends right behind a request ends with 0: no thread of the store's library aborts it."""
    code = (
        "import asyncio, sys\n"
        "from tiers.bucket.object_options import ObjectOptions\n"
        "from tiers.bucket.object_store import open_objects\n"
        "async def work():\n"
        "    options = ObjectOptions(endpoint=sys.argv[1], allow_http=True, access_key_id='k', secret_access_key='s')\n"
        "    objects = open_objects('s3://kvstore/exit', options)\n"
        "    await objects.put('a', b'x')\n"
        "    await objects.get('a')\n"
        "asyncio.run(work())\n"
    )
    for _ in range(15):
        ended = subprocess.run(
            [sys.executable, "-c", code, s3_server.endpoint], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
