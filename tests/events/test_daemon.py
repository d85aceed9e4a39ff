"""A real daemon and a subscriber: after whatever happens, the subscriber has exactly what the daemon holds."""

from __future__ import annotations

import json
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.kv_events.mirror import Held
from kvstore.client import Client, ClientError, Namespace, Refused
from kvstore.daemon.config.config import binds
from kvstore.daemon.config.config_sources import load
from kvstore.errors import ConfigError
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tests.events.following import Following, wait_until
from tests.region.proxy import Proxy
from tests.running import Daemon, Place, kvstore

OPERATIONS = 6000
RECORD_BYTES = 8192
CHAINS, DEPTH = 50, 12
SPACES = 3
DATA = bytes(RECORD_BYTES)
Serve = Callable[..., Daemon]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def chain(number: int) -> list[bytes]:
    """The first blocks of all chains are the same, as those of prompts are."""
    return [random.Random(f"{number if depth > 2 else 0}/{depth}").randbytes(32) for depth in range(DEPTH)]


class Node:
    """A daemon with little room, a client, and a subscriber behind a proxy that cuts its connection."""

    def __init__(self, place: Place, serve: Serve) -> None:
        self.place, self.serve = place, serve
        self.port = free_port()
        self.replay = f"ipc://{place.path}/r"
        self.words = [
            *place.with_nvme(),
            "--set=dram.capacity_bytes=4MiB",
            "--set=dram.slab_bytes=2MiB",
            "--set=dram.slot_bytes_min=4KiB",
            "--set=nvme.capacity_bytes=6MiB",
            "--set=nvme.slab_bytes=2MiB",
            "--set=stop_timeout_s=1",
            f"--set=events.endpoint=tcp://127.0.0.1:{self.port}",
            f"--set=events.replay_endpoint={self.replay}",
            "--set=events.interval_s=0.01",
            "--set=events.replay_bytes=64KiB",
        ]
        self.daemon = serve(place, *self.words)
        self.proxy = Proxy(self.port)
        self.following = Following(f"tcp://127.0.0.1:{self.proxy.port}", self.replay)
        self.client = Client(place.socket, timeout_s=30.0)
        self.ends = 0
        self.spaces = [self.new_space(number) for number in range(SPACES)]
        self.chains = [chain(number) for number in range(CHAINS)]

    def new_space(self, number: int) -> Namespace:
        digest = bytes([number, self.ends]) + bytes(14)
        return self.client.namespace(digest, RECORD_BYTES - 64 * number, 32, 16, {"model": f"m{number}"})

    def close(self) -> None:
        self.following.close()
        self.client.close()
        self.proxy.close()

    def restart(self, how: signal.Signals) -> None:
        self.daemon.stop(how)
        self.daemon = self.serve(self.place, *self.words)
        wait_until(self.is_connected)

    def is_connected(self) -> bool:
        """An operation of a client that waits before it connects again would be none."""
        with suppress(ClientError):
            self.client.ping()
            return True
        return False

    # -- what happens --

    def put(self, chance: random.Random) -> None:
        space, hashes = chance.choice(self.spaces), chance.choice(self.chains)[: chance.randint(1, DEPTH)]
        self.client.put(space, hashes, b"", [DATA[: space.record_bytes]] * len(hashes))

    def get(self, chance: random.Random) -> None:
        space, hashes = chance.choice(self.spaces), chance.choice(self.chains)[: chance.randint(1, DEPTH)]
        into = [bytearray(space.record_bytes) for _ in hashes]
        self.client.get(space, hashes, into, chance.choice((0.0, 0.005)))

    def prefetch(self, chance: random.Random) -> None:
        self.client.prefetch(chance.choice(self.spaces), chance.choice(self.chains))

    def limit(self, chance: random.Random) -> None:
        """A rule that makes blocks go: for a while."""
        space = chance.choice(self.spaces).digest.hex()
        match chance.randrange(4):
            case 0:
                self.client.set_ttl(chance.choice((0.2, 1.0, 30.0)), namespace=space)
            case 1:
                self.client.set_ttl(None, namespace=space, is_set=False)
            case 2:
                self.client.set_quota(chance.randrange(1 << 20), chance.randrange(1 << 21), namespace=space)
            case 3:
                self.client.set_quota(None, None, namespace=space)

    def end(self, chance: random.Random) -> None:
        """A namespace is over: another one takes its place."""
        number = chance.randrange(SPACES)
        self.client.unregister(self.spaces[number], end=True)
        self.ends += 1
        self.spaces[number] = self.new_space(number)

    def operate(self, chance: random.Random) -> None:
        kinds = (self.put, self.get, self.prefetch, self.limit, self.end)
        (kind,) = chance.choices(kinds, (55, 35, 9, 0.5, 0.1))
        with suppress(ClientError):  # refused: a rule that is not set; a daemon that is being started
            kind(chance)

    # -- what is held --

    def quiet(self) -> None:
        """Nothing is on its way any more, and no rule takes blocks away."""
        for space in self.spaces:
            digest = space.digest.hex()
            self.client.residency(space, self.chains[0])  # known to the daemon, also after a restart
            with suppress(ClientError):  # there is none
                self.client.set_quota(None, None, namespace=digest)
            with suppress(ClientError):
                self.client.set_ttl(None, namespace=digest, is_set=False)
        wait_until(self.is_quiet, lambda: str(self.client.status()))

    def is_quiet(self) -> bool:
        status = self.client.status()
        busy = status["loading_blocks"] + status["demoting_blocks"] + status["events"]["waiting_blocks"]
        return not busy and not status["adopting"]

    def truth(self) -> Held | None:
        """Of every namespace, also of one that ended just before a kill; None while one is being dropped."""
        found: Held = {}
        digests = [known["digest"] for known in self.client.list_namespaces() if known["blocks"]]
        for hashes in self.chains if digests else []:
            try:
                answer, _ = self.client.explain(list(map(bytes.fromhex, digests)), b"".join(hashes))
            except Refused:
                return None
            for digest, places in zip(digests, answer, strict=True):
                for block_hash, place in zip(hashes, places, strict=True):
                    for bit, tier in ((IN_DRAM, "dram"), (IN_NVME, "nvme")):
                        if place & bit:
                            found.setdefault((tier, digest), set()).add(
                                int.from_bytes(block_hash[-8:], "big")
                            )
        return found

    def prove(self) -> int:
        """The subscriber catches up with what was published by now, and has what is held; how many blocks."""
        self.quiet()
        seen: dict[str, Any] = {}

        def has_all() -> bool:
            before = self.client.status()["events"]["next_sequence"]
            truth = self.truth()
            if truth is None:
                return False
            whole, at, held = self.following.look()
            seen.update(truth=truth, held=held, whole=whole, at=at, events=self.client.status()["events"])
            return whole and at >= before and held == truth

        wait_until(has_all, lambda: difference(seen))
        return sum(map(len, seen["truth"].values()))


def difference(seen: dict[str, Any]) -> str:
    if not seen:
        return "a namespace is being dropped for ever"
    truth, held = seen["truth"], seen["held"]
    lines = [f"whole={seen['whole']} at={seen['at']} {seen['events']}"]
    for key in truth.keys() | held.keys():
        there, told = truth.get(key, set()), held.get(key, set())
        lines.append(
            f"{key}: {len(there)} held, {len(there - told)} not told, {len(told - there)} told wrongly"
        )
    return "\n".join(lines)


@pytest.fixture
def node(place: Place, serve: Serve) -> Iterator[Node]:
    node = Node(place, serve)
    yield node
    node.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_subscriber_has_what_the_daemon_holds(node: Node) -> None:
    """6,000 operations with evictions, rules, ended namespaces, kills, stops, cut connections and pauses: each time
    that all is quiet, the subscriber's state is the daemon's, block by block."""
    chance = random.Random(13)
    proved = 0
    for number in range(OPERATIONS):
        node.operate(chance)
        match number % 2000:
            case 200:
                node.proxy.mode = "cut"
            case 300 | 1400:  # after a few batches, after more than are kept
                node.proxy.mode = "pass"
                node.following.go_on()
            case 500:
                node.restart(signal.SIGKILL)
            case 700 | 1999:
                held = node.prove()
                assert held > 300
                proved += held
            case 800:
                node.following.pause()
            case 1450:
                node.restart(signal.SIGTERM if number > 4000 else signal.SIGKILL)
    counters = node.client.status()["counters"]
    assert counters["evicted_nvme"] > 300 and counters["evicted_dram"] > 300
    subscriber = node.following.subscriber
    assert subscriber.full_states > 3 and subscriber.replays > subscriber.full_states
    assert proved > 6 * 300


def test_a_stop_publishes_what_is_left_and_a_start_what_was_adopted(node: Node) -> None:
    """Nothing is told late: after a clean stop and a start the subscriber has what the new daemon adopted, by itself."""
    space = node.spaces[0]
    for hashes in node.chains[:10]:
        node.client.put(space, hashes, b"", [DATA[: space.record_bytes]] * len(hashes))
    held = node.prove()
    full_states = node.following.subscriber.full_states
    node.restart(signal.SIGTERM)
    assert node.prove() == held
    assert node.following.subscriber.full_states > full_states


def test_status_tells_of_events(node: Node) -> None:
    """`kvstore status` says what was published and who asked, in words and as JSON."""
    space = node.spaces[0]
    node.client.put(space, node.chains[0], b"", [DATA] * DEPTH)
    node.prove()
    told = kvstore("status", f"--socket={node.place.socket}")
    assert told.returncode == 0, told.stderr
    assert f"events      tcp://127.0.0.1:{node.port}: " in told.stdout
    assert "full states asked for" in told.stdout
    events = json.loads(kvstore("status", f"--socket={node.place.socket}", "-o", "json").stdout)["events"]
    assert events["stored_blocks"] >= DEPTH and events["full_states"] >= 1
    assert (events["problem"], events["lost_blocks"], events["gaps"]) == ("", 0, 0)


def test_without_events_zeromq_is_not_loaded(place: Place, serve: Serve) -> None:
    """A daemon that publishes nothing neither loads ZeroMQ nor shows events."""
    daemon = serve(place)
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "zmq" not in maps and "xxhash" in maps
    with Client(place.socket, timeout_s=30.0, attach=False) as client:
        assert client.status()["events"] is None


def test_an_endpoint_in_use_stops_the_start_in_one_line(place: Place) -> None:
    """The message names the key and the endpoint; nothing is left running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        ended = kvstore(
            "serve", *place.arguments, f"--set=events.endpoint={endpoint}", "--set=log.level=error"
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"kvstore: events.endpoint {endpoint}: cannot be had: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["events.endpoint=127.0.0.1:5557"],
            'events.endpoint = "127.0.0.1:5557": allowed are "", tcp://ADDRESS',
        ),
        (["events.endpoint=tcp://*:0"], "with ports 1 to 65535"),
        (["events.endpoint=tcp://*:65536"], "with ports 1 to 65535"),
        (["events.endpoint=tcp://[::zz]:5557"], "with ports 1 to 65535"),
        (["events.endpoint=ipc://run/e"], "an absolute path of at most 107 bytes"),
        (["events.endpoint=inproc://e"], 'allowed are ""'),
        (["events.replay_endpoint=tcp://*:5558"], "events.endpoint must be set"),
        (["events.endpoint=tcp://*:5557", "events.replay_endpoint=tcp://*:5557"], "must not be that of"),
        (
            ["events.endpoint=tcp://*:5557", "events.replay_endpoint=tcp://router:5558"],
            "must be one of this node",
        ),
        (["events.hash=hex"], "events.hash"),
        (["events.interval_s=0"], "allowed are 0.001 to 60.0"),
        (["events.replay_bytes=1KiB"], "allowed are 64KiB"),
        (["events.topic=" + "t" * 257], "at most 256"),
    ],
)
def test_wrong_settings_are_named_in_one_line(words: list[str], said: str) -> None:
    """Key, value and what is allowed; the exit code of wrong usage."""
    with pytest.raises(ConfigError) as caught:
        load(None, [*words, "security.plain=events"], environment={"KVSTORE_CONFIG": ""})
    (problem,) = caught.value.problems
    assert problem.startswith("--set: events.") and said in problem


@pytest.mark.parametrize(
    ("endpoint", "is_ours"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://[::1]:65535", True),
        ("ipc:///run/e", True),
        ("tcp://router.example:5557", False),
        ("tcp://localhost:5557", False),
    ],
)
def test_addresses_are_ours_and_names_are_those_of_others(endpoint: str, is_ours: bool) -> None:
    """An endpoint with an address is opened here; with a name, the daemon connects to it."""
    words = [f"events.endpoint={endpoint}", "security.plain=events"]
    config = load(None, words, environment={"KVSTORE_CONFIG": ""}).config
    assert binds(config.events.endpoint) == is_ours
