"""The scale plan: requests and money of a region with 10, 100 and 1,000 nodes, from the code's own constants.

    python -m benchmarks.scale          the tables of docs/scale.md
    python -m benchmarks.counted        real processes, whose requests a proxy counts (40 minutes)

What a node does per second follows from how often it looks, announces and reads; tests/replication/test_scale.py holds this
against the real code under a virtual clock, and docs/scale.md against this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from replication.audit.auditing import AUDIT_INTERVAL_S
from replication.constants import NODE_INTERVAL_S, SEGMENT_REMOVED_MAX, SOURCE_TOMBSTONES_S, UPKEEP_INTERVAL_S
from replication.feed.feed import FULL_LOOK_EVERY, LISTED_CLOSELY_S, LISTED_S
from replication.feed.tail import POLL_INTERVAL_PER_WRITER_S, POLL_INTERVAL_S
from replication.keeper.keeper import BEAT_INTERVAL_S
from replication.keeper.news_reader import NEWS_INTERVAL_S, SURE_S
from replication.keeper.watch import FOLDERS
from replication.mirror.mirror import HEARTBEAT_S
from replication.region.region_node import announce_interval_s
from replication.region.region_reader import FETCH_RANGE_BYTES
from replication.region.upkeep import UPKEEP_SURE_S

SOURCE_FOLDERS = 3  # of which a mirror brings what is new
KEPT_FOLDERS = 2  # doubts and removed models, at which the keeper looks whatever its own list says
MONTH_S = 365.25 / 12 * 86_400
UPKEEP_PAUSE_SHARE = 0.75  # of the interval, on average
PAUSE_SHARE = 0.95  # the same of a keeper's
LIST_NAMES = 1000  # in one page of a LIST
PUT_PRICE, GET_PRICE = 5e-6, 0.4e-6  # a request: PUT and LIST, GET and HEAD; deletes are free
STORAGE_GB_MONTH_PRICE, TRANSFER_GB_PRICE = 0.023, 0.02
GPU_NODE_HOUR_PRICE = 16.0  # eight GPUs
NODES = (10, 100, 1000)


@dataclass(frozen=True)
class Load:
    """What one node brings and takes, on average. pack_bytes: durable.pack_bytes. kept_s: life of a pack."""

    packs_per_s: float = 0.05
    pack_bytes: float = 16 * 2**20
    fetched_bytes_per_s: float = 4e6
    kept_s: float = 7 * 86_400.0


@dataclass(frozen=True)
class Requests:
    """Per second. puts: LISTs, too, which cost the same."""

    puts: float = 0.0
    gets: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.puts + other.puts, self.gets + other.gets)

    def times(self, count: float) -> Requests:
        return Requests(self.puts * count, self.gets * count)

    @property
    def month_price(self) -> float:
        return (self.puts * PUT_PRICE + self.gets * GET_PRICE) * MONTH_S


def announcements_per_s(nodes: int, load: Load) -> float:
    """Of one node: what became durable in an interval is announced at once."""
    interval_s = announce_interval_s(nodes)
    return (1 - math.exp(-load.packs_per_s * interval_s)) / interval_s


def interval_s(nodes: int) -> float:
    """Between two looks of one node for what is new."""
    return max(POLL_INTERVAL_S, POLL_INTERVAL_PER_WRITER_S * nodes)


def following(nodes: int, load: Load, writes: bool = True) -> Requests:
    """One node reads the feeds of all. writes: they write."""
    pages = math.ceil(nodes / LIST_NAMES)
    read = nodes * announcements_per_s(nodes, load) + removals_per_s(nodes, load) if writes else 0.0
    return Requests(pages / LISTED_S, read + 1 / (PAUSE_SHARE * NEWS_INTERVAL_S))


def listing(nodes: int, load: Load, writes: bool = True) -> Requests:
    """What the keeper does in addition, for all: writers' heads, folders, news, and that it is alive. It listens to the bell instead of
    reading news, and while there is no writer, heads wait for it, too. A closer look asks all writers."""
    pages, looks = math.ceil(nodes / LIST_NAMES), 1 / interval_s(nodes)
    beats_s = (
        math.ceil((BEAT_INTERVAL_S - NEWS_INTERVAL_S) / (PAUSE_SHARE * NEWS_INTERVAL_S))
        * PAUSE_SHARE
        * NEWS_INTERVAL_S
    )
    written = 1 / beats_s
    if writes:
        new = looks * (1 - math.exp(-nodes * announcements_per_s(nodes, load) / looks))
        written = new + written * math.exp(-new * BEAT_INTERVAL_S)
    else:
        looks = 1 / SURE_S
    lists = looks * pages * (1 + 1 / FULL_LOOK_EVERY)
    asked_in_vain = looks * nodes / FULL_LOOK_EVERY
    sure = Requests(
        (len(FOLDERS) + 1 + KEPT_FOLDERS) / SURE_S, 1 / SURE_S
    )  # the latter: what time the store has
    return Requests(lists + written, asked_in_vain + 2 * written) + sure


def announcing(nodes: int, load: Load) -> Requests:
    """One node's own feed: a segment, read back, and the head."""
    rate = announcements_per_s(nodes, load)
    return Requests(2 * rate, rate)


def persisting(nodes: int, load: Load) -> Requests:
    """Packs of all nodes put, and looked at by the keeper before they are deleted, which asks all writers before that, and says what it
    removes."""
    looks = 1 / (UPKEEP_PAUSE_SHARE * UPKEEP_INTERVAL_S + UPKEEP_SURE_S)
    pages = math.ceil(nodes / LIST_NAMES)
    packs = nodes * load.packs_per_s
    told = removals_per_s(nodes, load)
    return Requests(packs + looks * 2 * pages + 2 * told, packs + looks * nodes + told)


def removals_per_s(nodes: int, load: Load) -> float:
    """Segments of the keeper's feed that say what is over."""
    looks = 1 / (UPKEEP_PAUSE_SHARE * UPKEEP_INTERVAL_S + UPKEEP_SURE_S)
    return looks * math.ceil(nodes * load.packs_per_s / looks / SEGMENT_REMOVED_MAX)


def fetching(load: Load) -> Requests:
    return Requests(0.0, load.fetched_bytes_per_s / min(FETCH_RANGE_BYTES, load.pack_bytes))


def tombstones() -> Requests:
    """One node looks for them all the same, whatever the news say."""
    return Requests(1 / SURE_S, 0.0)


def warming() -> Requests:
    """The same for orders; and each node's own state."""
    return Requests(1 / SURE_S + 1 / NODE_INTERVAL_S, 0.0)


def audit_lists(packs: float) -> int:
    """Of one audit: all packs, once, and whether there are models, which are few; tombstones before each page of orphans apart."""
    return math.ceil(packs / LIST_NAMES) + 1


def auditing(nodes: int, load: Load) -> Requests:
    """All audits of a region."""
    packs = nodes * load.packs_per_s * load.kept_s
    return Requests(audit_lists(packs), 0.0).times(1 / AUDIT_INTERVAL_S)


def idle(nodes: int) -> Requests:
    """One node of a region in which nobody writes."""
    return following(nodes, Load(), False) + tombstones() + warming()


def idle_keeper(nodes: int) -> Requests:
    return idle(nodes) + listing(nodes, Load(), False)


def reading_through(nodes: int, load: Load) -> Requests:
    """One node that follows another region of so many nodes; what it fetches there it does not fetch at home."""
    return following(nodes, load) + Requests(1 / SURE_S, 0.0)


def following_closely(nodes: int, load: Load, writes: bool = True) -> Requests:
    """A mirror at its source: it reads news as nodes do, and lists heads when they say something new, and every two minutes, as it has
    to know how old all is that it knows. Besides, it brings tombstones."""
    pages, looks = math.ceil(nodes / LIST_NAMES), 1 / (interval_s(nodes) if writes else POLL_INTERVAL_S)
    read = nodes * announcements_per_s(nodes, load) if writes else 0.0
    new = looks * (1 - math.exp(-read / looks))
    lists = new + math.exp(-new * LISTED_CLOSELY_S) / LISTED_CLOSELY_S
    asked_in_vain = lists * nodes / FULL_LOOK_EVERY if writes else 0.0
    feed = Requests(lists * pages * (1 + 1 / FULL_LOOK_EVERY), read + looks + asked_in_vain)
    return feed + Requests(SOURCE_FOLDERS / SURE_S, 1 / SOURCE_TOMBSTONES_S)


def mirroring(nodes: int, load: Load) -> Requests:
    """A mirror of one other region of so many nodes: follows it, copies each pack, announces it."""
    copies = nodes * load.packs_per_s
    return following_closely(nodes, load) + Requests(copies, copies) + announcing(nodes, load)


def idle_source(nodes: int) -> Requests:
    """A mirror at its source, where nobody writes."""
    return following_closely(nodes, Load(), False)


def idle_mirror(nodes: int) -> Requests:
    """A mirror at home, which it keeps, where nobody writes: it says how it is, and looks for orders."""
    orders = Requests(1 / SURE_S, 0.0)
    told = Requests(1 / HEARTBEAT_S, 0.0)
    return following(nodes, Load(), False) + tombstones() + orders + told + listing(nodes, Load(), False)


IDLE = {
    "one idle node": idle,
    "the keeper, where nobody writes": idle_keeper,
    "a mirror at its source, where nobody writes": idle_source,
    "a mirror at home, which it keeps, the same": idle_mirror,
}


def _cells(requests: list[Requests]) -> list[str]:
    return [f"{r.puts:,.1f} + {r.gets:,.1f} /s, ${r.month_price:,.0f}" for r in requests]


def rows(load: Load) -> Iterator[tuple[str, list[str]]]:
    """Lines of the table: what, and a figure for each of NODES."""
    parts = {
        "following the feeds": [following(n, load).times(n) for n in NODES],
        "announcing": [announcing(n, load).times(n) for n in NODES],
        "packs put and deleted": [persisting(n, load) for n in NODES],
        "keeping, by one of them": [listing(n, load) for n in NODES],
        "packs fetched": [fetching(load).times(n) for n in NODES],
        "looking for tombstones and orders, writing its own state": [
            (tombstones() + warming()).times(n) for n in NODES
        ],
        "audits": [auditing(n, load) for n in NODES],
        "one mirror of this region": [mirroring(n, load) for n in NODES],
    }
    for what, requests in parts.items():
        yield what, _cells(requests)
    stored_gb = [n * load.packs_per_s * load.pack_bytes * load.kept_s / 1e9 for n in NODES]
    copied_gb = [n * load.packs_per_s * load.pack_bytes * MONTH_S / 1e9 for n in NODES]
    requests_price = [sum(r[i].month_price for r in parts.values()) for i in range(len(NODES))]
    yield "stored", [f"{gb / 1000:,.1f} TB, ${gb * STORAGE_GB_MONTH_PRICE:,.0f}" for gb in stored_gb]
    yield (
        "copied to one mirror",
        [f"{gb / 1000:,.1f} TB, ${gb * TRANSFER_GB_PRICE:,.0f}" for gb in copied_gb],
    )
    gpus = [n * GPU_NODE_HOUR_PRICE * MONTH_S / 3600 for n in NODES]
    sums = [
        r + s * STORAGE_GB_MONTH_PRICE + c * TRANSFER_GB_PRICE
        for r, s, c in zip(requests_price, stored_gb, copied_gb, strict=True)
    ]
    yield "requests of it all", [f"${price:,.0f}" for price in requests_price]
    yield (
        "all of it, of what the GPUs cost",
        [f"{100 * a / b:.2f} %" for a, b in zip(sums, gpus, strict=True)],
    )
    yield (
        "in addition, if all read a second such region through",
        _cells([reading_through(n, load).times(n) for n in NODES]),
    )
    for what, each in IDLE.items():
        yield (
            what,
            [
                f"{1000 * r.gets:,.0f} + {1000 * r.puts:,.1f} /1,000 s, ${r.month_price:,.2f}"
                for r in map(each, NODES)
            ],
        )
    yield (
        "news reaches all nodes within",
        [
            f"{announce_interval_s(n) + 1.2 * interval_s(n) + NEWS_INTERVAL_S + 1.2 * (interval_s(n) - POLL_INTERVAL_S):.0f} s"
            for n in NODES
        ],
    )


def table(load: Load) -> str:
    head = ["a month", *(f"{n:,} nodes" for n in NODES)]
    lines = [head, ["---"] * len(head), *([what, *cells] for what, cells in rows(load))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table(Load()))
