"""How long until a model is ready, on paper: stage by stage, and what holds each stage back.

    bucket ──fetch──▶ NVMe ──load──▶ devices ──start──▶ compile ──▶ ready
                      DRAM ──copy──▶ devices

A stage is as fast as the slowest thing it goes through. What these do at best is said by whoever plans, or measured; what of it is
reached is one of the shares below, each with the place where it was seen. A node that fetches writes while it reads, and an
engine that is fed from the bucket loads meanwhile: these two take as long as the slower one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

# Shares of a rate that are reached.
NETWORK_SHARE: Final = 0.8  # of a network card: what nodes reach from object stores, 100 to 400 Gb/s
DISK_SHARE: Final = 0.9  # of a drive's data sheet, O_DIRECT, several requests at a time
VERIFIED_SHARE: Final = 0.916  # with xxh3_128 of all that is read, as loads do it: 1.47 of 1.62 GB/s
COPY_SHARE: Final = 0.85  # of two threads' memcpy, through a ring to a device

# Where nobody says or measures it.
LINK_BYTES_PER_S: Final = 25e9  # of a device: PCIe 4.0 x16, after its protocol
MEMORY_BYTES_PER_S: Final = 60e9  # of a node's memory, to all its devices: 690 GB in 12 to 15 s
START_S: Final = 54.0  # an engine's processes, graphs and warm-up, all caches warm: 125 GiB on 8 devices, ready after 68.6 s, 14.3 of them weights
COMPILE_S: Final = 316.0  # more without its caches: DeepSeek-V4-Pro on 8 devices, ready after 7 min 0 s instead of 1 min 44 s

Place = Literal["bucket", "bucket, loading meanwhile", "nvme", "dram"]


@dataclass(frozen=True)
class Machines:
    """What there is, in bytes a second. store: of the bucket, to all nodes together. nic: of a node's network card; None where
    `store` was measured through it. nvme: of all drives of a node. devices: of a node; each has a link of its own."""

    nodes: int
    devices: int
    nvme: float
    store: float
    nic: float | None = None
    memory: float = MEMORY_BYTES_PER_S
    link: float = LINK_BYTES_PER_S
    start_s: float = START_S
    compile_s: float = COMPILE_S


class Stage(NamedTuple):
    """rate: bytes a second of one node, 0 where no bytes are moved. limit: what it is held back by."""

    name: str
    seconds: float
    rate: float
    limit: str


class Ready(NamedTuple):
    """Of a node that has the model in this place, or not at all (bucket). stages: names of what it goes through."""

    place: Place
    cache_hit: bool
    seconds: float
    bottleneck: str
    stages: tuple[str, ...]


class Plan(NamedTuple):
    """bucket_bytes: read from the bucket by all nodes."""

    size_bytes: int
    bucket_bytes: int
    stages: list[Stage]
    ready: list[Ready]


def plan(size_bytes: int, machines: Machines) -> Plan:
    """Nothing is asked and nothing measured."""
    stages = list(_stages(size_bytes, machines))
    by_name = {stage.name: stage for stage in stages}
    ready = [
        _ready(place, names, cache_hit, by_name)
        for place, names in WAYS.items()
        for cache_hit in (True, False)
    ]
    return Plan(size_bytes, size_bytes * machines.nodes, stages, ready)


FETCH, LOAD, COPY = "bucket to NVMe", "NVMe to devices", "DRAM to devices"
START, COMPILE = "engine start", "compile"
WAYS: Final[dict[Place, tuple[str, ...]]] = {
    "bucket": (FETCH, LOAD),
    "bucket, loading meanwhile": (FETCH, LOAD),
    "nvme": (LOAD,),
    "dram": (COPY,),
}


def _stages(size_bytes: int, machines: Machines) -> Iterator[Stage]:
    disk = machines.nvme * DISK_SHARE * VERIFIED_SHARE
    copied = {
        "memory": machines.memory * COPY_SHARE,
        f"links of {machines.devices} devices": machines.link * machines.devices * COPY_SHARE,
    }
    shared = f"store, shared by {machines.nodes} nodes" if machines.nodes > 1 else "store"
    network = {shared: machines.store / machines.nodes}
    if machines.nic is not None:
        network["network card"] = machines.nic * NETWORK_SHARE
    yield _moved(FETCH, size_bytes, {**network, "NVMe": disk})
    yield _moved(LOAD, size_bytes, {"NVMe": disk, **copied})
    yield _moved(COPY, size_bytes, copied)
    yield Stage(START, machines.start_s, 0.0, "the engine")
    yield Stage(COMPILE, machines.compile_s, 0.0, "the engine, without its compile caches")


def _moved(name: str, size_bytes: int, rates: Mapping[str, float]) -> Stage:
    limit = min(rates, key=lambda key: rates[key])
    return Stage(name, size_bytes / rates[limit], rates[limit], limit)


def _ready(place: Place, names: tuple[str, ...], cache_hit: bool, by_name: Mapping[str, Stage]) -> Ready:
    weights = [by_name[name] for name in names]
    if place == "bucket, loading meanwhile":
        weights = [max(weights, key=lambda stage: stage.seconds)]
    stages = [*weights, by_name[START], *([] if cache_hit else [by_name[COMPILE]])]
    longest = max(stages, key=lambda stage: stage.seconds)
    seconds = sum(stage.seconds for stage in stages)
    return Ready(place, cache_hit, seconds, f"{longest.name}: {longest.limit}", tuple(s.name for s in stages))
