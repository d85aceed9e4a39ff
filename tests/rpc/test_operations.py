"""Operations, with real processes: watched to their ends, cancelled, failed, too many, and none left behind."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from kvstore.errors import BadRequest, Failed, LimitExceeded, NotAllowed, NotFound, Unavailable
from kvstore.security.principals import EVERYTHING, Principal
from kvstore.tools.rpc import operations
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.commands import JSON, word
from kvstore.tools.rpc.models import publishable
from kvstore.tools.rpc.operations import Operations
from kvstore.v1.types_pb2 import Operation
from tests.region.regions import until
from tests.running import Daemon, Place, environment

DAY_S = 86400.0


def call_of(principal: Principal, method: str = "ModelService/PreloadModel") -> Call:
    return Call(
        method, principal, time.monotonic() + DAY_S, None
    )  # made when the tests are collected, long before they run


CALL = call_of(Principal(0, 1, EVERYTHING))
VIEWER = call_of(Principal(-1, 0, frozenset({"view"}), "a viewer"))
PUBLISHER = call_of(Principal(-1, 0, frozenset({"publisher"}), "a publisher"))
SHOW = ["config", "show", JSON]
SETTINGS = {
    **dict.fromkeys(operations._FOR_COMMANDS, "/a/file"),
    "region": "eu",
    "models.nvme_bytes": "0",
    "log.level": "debug",
    **{name: "0" for name in operations._FOR_COMMANDS if name.endswith("price")},
}


@pytest.fixture
def patience(serve: Callable[..., Daemon], place: Place) -> list[str]:
    """A command that takes an hour: two looks at a daemon."""
    serve(place)
    return ["top", "--interval=1h", f"--socket={place.socket}", JSON]


def run(work: Callable[[Operations], Awaitable[None]]) -> None:
    async def settings(_: float) -> dict[str, str]:
        return SETTINGS

    async def whole() -> None:
        known = Operations(settings)
        try:
            await work(known)
        finally:
            await known.close()

    uvloop.run(whole())  # as kvstore grpc does


def children() -> set[int]:
    """Of this process, those that live."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")
            if b"--child" in words:
                found.add(int(stat.parent.name))
    return found


async def begin(known: Operations, subject: str, *words: str) -> Operation:
    return copy.deepcopy(await known.begin(CALL, subject, list(words)))


async def ended(known: Operations, name: str) -> list[Operation]:
    """All that is told of one, to its end."""
    return [copy.deepcopy(state) async for state in known.get(CALL, name).states()]


def test_watched_to_its_end() -> None:
    """An operation is RUNNING, then DONE with the document that the command prints; both are told to who watches, the end to who
    comes later."""

    async def work(known: Operations) -> None:
        begun = await begin(known, "a subject", *SHOW)
        assert (begun.method, begun.subject) == ("ModelService/PreloadModel", "a subject")
        assert begun.state == Operation.STATE_RUNNING
        assert begun.HasField("begun") and not begun.HasField("ended")
        first, *_, last = await ended(known, begun.id)
        assert (first.state, last.state) == (Operation.STATE_RUNNING, Operation.STATE_DONE)
        assert last.HasField("ended") and not last.problem and not last.exit_code
        shown = json.loads(last.document_json)["values"]
        assert shown["region"]["value"] == "eu"  # of the daemon's settings, those that commands go by, and …
        assert shown["log.level"]["source"] == "default"  # … no others
        assert [state.state for state in await ended(known, begun.id)] == [Operation.STATE_DONE]
        assert [(one.id, one.document_json) for one in known.newest(CALL)] == [(begun.id, "")]

    run(work)


def test_failed_with_its_line(tmp_path: Path) -> None:
    """An operation whose command fails has its one line of error as its problem, and no document."""

    async def work(known: Operations) -> None:
        words = ["model", "show", "nowhere", f"--to=file://{tmp_path}", JSON]
        begun = await begin(known, "nowhere", *words)
        last = (await ended(known, begun.id))[-1]
        assert (last.state, last.exit_code, last.document_json) == (Operation.STATE_FAILED, 3, "")
        assert "no model nowhere" in last.problem and "\n" not in last.problem
        with pytest.raises(NotFound, match="no model nowhere"):
            await known.ask(CALL, words)
        with pytest.raises(BadRequest, match="allowed are s3"):
            await known.ask(CALL, ["model", "show", "nowhere", "--to=ftp://x", JSON])
        with pytest.raises(Unavailable, match="is it running"):
            await known.ask(CALL, ["ping", f"--socket={tmp_path / 'none'}"])

    run(work)


def test_what_a_killed_one_says() -> None:
    """An operation whose process is killed from outside has failed, and names the signal."""

    async def work(known: Operations) -> None:
        begun = await begin(known, "", *SHOW)
        while not children():
            await asyncio.sleep(0.001)
        os.kill(children().pop(), signal.SIGKILL)
        last = (await ended(known, begun.id))[-1]
        assert (last.state, last.problem) == (Operation.STATE_FAILED, "signal 9")

    run(work)


def test_cancelled(patience: list[str]) -> None:
    """Cancelled, an operation ends, and its process with it, by who has the right to begin it; afterwards, nothing happens."""

    async def work(known: Operations) -> None:
        begun = await begin(known, "", *patience)
        with pytest.raises(NotAllowed, match="admin"):
            known.cancel(VIEWER, begun.id)
        known.cancel(CALL, begun.id)
        last = (await ended(known, begun.id))[-1]
        assert (last.state, last.problem) == (Operation.STATE_CANCELLED, "")
        assert not children()
        assert known.cancel(CALL, begun.id).state == Operation.STATE_CANCELLED
        with pytest.raises(NotFound):
            known.cancel(CALL, "another")

    run(work)


def test_one_that_hangs_is_killed(patience: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not end when it is cancelled is killed."""
    monkeypatch.setattr(operations, "KILL_AFTER_S", 0.2)

    async def work(known: Operations) -> None:
        begun = await begin(known, "", *patience)
        while not children():
            await asyncio.sleep(0.01)
        os.kill(children().pop(), signal.SIGSTOP)
        known.cancel(CALL, begun.id)
        assert (await ended(known, begun.id))[-1].state == Operation.STATE_CANCELLED

    run(work)


def test_a_process_inherits_nothing(
    patience: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation's process has no descriptor of ours but its three pipes, none of our settings, and is no member of our group."""
    monkeypatch.setenv("KVSTORE_LOG__LEVEL", "nonsense")

    def open_files(pid: int) -> set[str]:
        links = Path(f"/proc/{pid}/fd").iterdir()
        return {os.readlink(link) for link in links if link.is_symlink()}

    def look(before: set[str]) -> None:
        (child,) = children()
        files = open_files(child)
        assert not any("secret" in name for name in files), files
        assert not files & before - {"/dev/null"}, files
        assert b"KVSTORE_LOG__LEVEL" not in Path(f"/proc/{child}/environ").read_bytes()
        assert os.getpgid(child) == child

    async def work(known: Operations) -> None:
        before = open_files(os.getpid())
        begun = await begin(known, "", *patience)
        while not children():
            await asyncio.sleep(0.01)
        look(before)
        known.cancel(CALL, begun.id)
        await ended(known, begun.id)

    with open(tmp_path / "secret", "w") as secret:
        os.set_inheritable(secret.fileno(), True)
        run(work)


def test_no_more_than_so_many(patience: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit none is begun; of those that have ended, the last ones are known."""
    monkeypatch.setattr(operations, "OPERATIONS_MAX", 1)
    monkeypatch.setattr(operations, "OPERATIONS_KEPT", 1)

    async def work(known: Operations) -> None:
        begun = []
        for _ in range(3):
            begun.append(await begin(known, "", *patience))
            with pytest.raises(LimitExceeded, match="1 operation at a time"):
                await begin(known, "", *patience)
            known.cancel(CALL, begun[-1].id)
            await ended(known, begun[-1].id)
        assert [one.id for one in known.newest(CALL)] == [begun[2].id, begun[1].id]
        with pytest.raises(NotFound):
            known.get(CALL, begun[0].id)

    run(work)


def test_one_who_asks_leaves_others_their_share(patience: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operations and of short commands: who has three quarters is refused, and another one is not, until all are taken."""
    monkeypatch.setattr(operations, "OPERATIONS_MAX", 2)
    monkeypatch.setattr(operations, "ASKED_MAX", 2)

    async def work(known: Operations) -> None:
        asking = [asyncio.create_task(known.ask(VIEWER, patience))]
        while not children():
            await asyncio.sleep(0.01)
        with pytest.raises(LimitExceeded, match="2 short calls at a time are allowed, 1 of one who asks"):
            await known.ask(VIEWER, SHOW)
        assert "region" in await known.ask(CALL, SHOW)
        asking.append(asyncio.create_task(known.ask(CALL, patience)))
        while len(children()) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(LimitExceeded, match="2 short calls"):
            await known.ask(PUBLISHER, SHOW)
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
        assert "region" in await known.ask(VIEWER, SHOW)
        begun = [await known.begin(CALL, "", patience)]
        with pytest.raises(LimitExceeded, match="2 operations at a time are allowed, 1 of one who asks"):
            await known.begin(CALL, "", patience)
        begun.append(await known.begin(PUBLISHER, "", patience))
        with pytest.raises(LimitExceeded, match="2 operations"):
            await known.begin(VIEWER, "", patience)
        known.cancel(CALL, begun[0].id)
        await ended(known, begun[0].id)
        await known.begin(CALL, "", patience)

    run(work)


def test_a_call_that_is_given_up_ends_its_process(patience: list[str]) -> None:
    """A short command ends with the call that waits for it."""

    async def work(known: Operations) -> None:
        asking = asyncio.create_task(known.ask(CALL, patience))
        while not children():
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while children():
            await asyncio.sleep(0.01)

    run(work)


def test_a_pipe_is_closed_once() -> None:
    """A descriptor that somebody else opens in that moment is not taken from them."""
    end, begin = os.pipe()
    bystanders: list[int] = []

    class Pipe(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                bystanders.append(os.open(os.devnull, os.O_RDONLY))
            super().close()

    async def work() -> None:
        os.write(begin, b"all of it")
        with operations.reading(Pipe(end)) as came:
            os.close(begin)
            assert await came.read() == b"all of it"
        await asyncio.sleep(0)

    uvloop.run(work())
    [bystander] = bystanders
    os.close(bystander)
    with pytest.raises(OSError):
        os.fstat(end)


def test_too_long_a_document_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a message may be is not kept."""
    monkeypatch.setattr(operations, "DOCUMENT_BYTES_MAX", 50)

    async def work(known: Operations) -> None:
        begun = await begin(known, "", *SHOW)
        last = (await ended(known, begun.id))[-1]
        assert (last.state, last.problem) == (Operation.STATE_FAILED, "its document has more than 50 bytes")

    run(work)


OWNER = f"""
SETTINGS = {SETTINGS}
import asyncio, sys
import uvloop
from kvstore.security.principals import EVERYTHING, Principal
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.operations import Operations

async def settings(_):
    return SETTINGS

async def whole():
    call = Call("ModelService/PreloadModel", Principal(0, 1, EVERYTHING), 1e9, None)
    await Operations(settings).begin(call, "", sys.argv[1:])
    await asyncio.sleep(3600)

uvloop.run(whole())
"""


def test_none_is_left_when_the_owner_is_killed(patience: list[str]) -> None:
    """However the process that began operations ends, theirs end."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *patience], env=environment())
    try:
        children_of = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
        until(lambda: "--child" in _words(children_of.read_text()))
        (child,) = children_of.read_text().split()
        until(lambda: len(os.listdir(f"/proc/{child}/task")) > 1)  # it listens to its stdin
    finally:
        owner.kill()
        owner.wait()
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not _words(child))


def _words(pid: str) -> str:
    try:
        return Path(f"/proc/{pid.strip()}/cmdline").read_text()
    except OSError:
        return ""


def test_a_value_is_no_option() -> None:
    """What begins with "-", is empty, too long or cannot be shown is refused as an argument."""
    assert word("model", "a-b@c") == "a-b@c"
    for text in ("", "-o", "--to=file:///etc", "a\nb", "a\0b", "a\x1b[2J", "x" * 1025):
        with pytest.raises(BadRequest, match="model: "):
            word("model", text)


def test_what_is_published_lies_below_what_is_allowed(tmp_path: Path) -> None:
    """Neither a way out by "..", nor a link, nor a neighbour with a longer name; the command is told below what, and looks again."""
    allowed = tmp_path / "models"
    for path in (allowed / "tiny", tmp_path / "models-of-others"):
        path.mkdir(parents=True)
    (allowed / "out").symlink_to(tmp_path / "models-of-others")
    names = [str(tmp_path / "elsewhere"), str(allowed)]
    assert publishable(f"{allowed}/out/../models/tiny", names) == (str(allowed / "tiny"), str(allowed))
    for way in ("out", "..", "../models-of-others", "tiny/../../models-of-others"):
        with pytest.raises(BadRequest, match="absolute paths below"):
            publishable(f"{allowed}/{way}", names)
    with pytest.raises(BadRequest):
        publishable("tiny", names)
    with pytest.raises(Failed, match="publish_from is not set"):
        publishable(str(allowed), [])
