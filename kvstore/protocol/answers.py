"""What the daemon answers about itself: the fields of each answer, once, for daemon, client, command line and page.

They travel as maps (`frames.StatusReport`) and are printed as they are by `-o json`; docs/cli.md says what each field
means. Fields may be added, in a new daemon; none is renamed or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypedDict


class SlotClass(TypedDict):
    slot_bytes: int
    total: int
    used: int


class Tier(TypedDict):
    name: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    records: int
    model_bytes: int
    classes: Sequence[SlotClass]


class Breaker(TypedDict):
    name: str
    directory: str
    state: str
    trips: int
    reason: str
    retry_in_s: float
    jobs: int
    oldest_job_s: float


class Disk(TypedDict):
    """An NVMe directory. level: "" of one that is only remembered. records, used_bytes: None where no daemon has read it.
    room_bytes: what it can have of its capacity."""

    level: str
    directory: str
    device: str
    file_system: str
    state: str
    problem: str
    todo: str
    records: int | None
    used_bytes: int | None
    capacity_bytes: int
    room_bytes: int


class Speed(TypedDict):
    name: str
    latency_s: float
    bytes_per_s: int
    waiting_bytes: int
    samples: int


class Queue(TypedDict):
    name: str
    length: int
    limit: int


class WriteBudget(TypedDict):
    write_bytes_per_day: int
    spent_bytes: int
    allowance_bytes: int
    worth_min: float


class Model(TypedDict):
    """In DRAM."""

    name: str
    revision: str
    state: str
    bytes: int
    ready_bytes: int
    users: int
    pinned: bool
    idle_s: float


class Figures(TypedDict):
    """Of the engine, in a Status and in a Live answer."""

    tiers: list[Tier]
    counters: dict[str, int]
    loading_blocks: int
    demoting_blocks: int
    unverified_blocks: int
    adopting: bool
    write_budget: WriteBudget | None
    breakers: list[Breaker]
    speeds: list[Speed]
    queues: list[Queue]
    namespaces_total: int
    models: list[Model]


class Peer(TypedDict):
    """One client. pid: None where it is of another pid namespace. model, tenant: with a comma between several."""

    id: int
    label: str
    pid: int | None
    uid: int
    model: str
    tenant: str
    namespaces: int
    connected_s: float
    requests: int
    asked_blocks: int
    hit_blocks: int
    stored_bytes: int
    loaded_bytes: int
    leases: int


class Session(Peer):
    owner: int


class Client(Peer):
    attached: bool
    lease_bytes: int


class Clients(TypedDict):
    clients: list[Client]
    clients_left: int


class SlowRequest(TypedDict):
    """why: of `kvstore.door.clients.WHY`."""

    ago_s: float
    took_s: float
    waited_s: float
    request: str
    blocks: int
    why: str
    id: int
    label: str
    pid: int | None
    model: str
    tenant: str


class SlowRequests(TypedDict):
    slow_s: float
    total: int
    slow: list[SlowRequest]


class SmallNamespace(TypedDict):
    """column_runs: (how many columns, bytes of each), in order; none: one column."""

    digest: str
    record_bytes: int
    hash_bytes: int
    columns: int
    column_runs: list[tuple[int, int]]
    block_tokens: int
    blocks: int
    asked_blocks: int
    hit_blocks: int
    fields: dict[str, str]


class Namespace(SmallNamespace):
    """users: connections that have it registered now. differs: of `fields`, those that others of its model and tenant have another
    value of."""

    users: int
    dram_bytes: int
    nvme_bytes: int
    differs: dict[str, str]


class Difference(TypedDict):
    field: str
    values: list[str]


class Holding(TypedDict):
    """What is held of a model and a tenant. kinds: of engines, which share nothing with each other."""

    model: str
    tenant: str
    kinds: int
    namespaces: int
    blocks: int
    dram_bytes: int
    nvme_bytes: int
    asked_blocks: int
    hit_blocks: int
    differs: list[Difference]


class EngineStatus(Figures):
    sessions: list[Session]
    namespaces: list[Namespace]
    holdings: list[Holding]


class Identity(TypedDict):
    version: str
    pid: int
    instance: str
    uptime_s: float
    now_s: float
    data_dir: str
    socket_path: str
    host: str
    region_name: str


class Problem(TypedDict):
    """kind, subject: stable words. level: problem or warning. since_s: unix seconds. count: how often it was met. fix: what to do."""

    kind: str
    subject: str
    level: str
    text: str
    fix: str
    since_s: float
    count: int


OF_HEALTH: Final = frozenset(
    {"books", "missing", "disk"}
)  # kinds of problems of a daemon that is not well itself


class Health(TypedDict):
    ok: bool


class Arena(TypedDict):
    path: str
    pages: str
    adopted: bool
    prefaulted_bytes: int
    backed_bytes: int
    quarantined_slots: int


class Events(TypedDict):
    endpoint: str
    problem: str
    next_sequence: int
    batches: int
    stored_blocks: int
    removed_blocks: int
    waiting_blocks: int
    lost_blocks: int
    gaps: int
    kept_bytes: int
    replays: int
    full_states: int
    answers_lost: int


class Door(TypedDict):
    connections: int
    attached: int
    accepted: int
    refused: dict[str, int]
    frames: dict[str, int]
    slow: dict[str, int]


class Preload(TypedDict):
    """Of a model that models.preload names, or that was ordered. state: waiting, running, there or failed."""

    model: str
    state: str
    bytes: int
    left_bytes: int
    bytes_per_s: int
    by_source: dict[str, int]
    attempts: int
    problem: str


class Status(EngineStatus):
    daemon: Identity
    health: Health
    problems: list[Problem]
    disks: list[Disk]
    arena: Arena
    region: dict[str, Any] | None  # what `replication` says of it, which knows nothing of us
    events: Events | None
    preloads: list[Preload]
    door: Door


class Namespaces(TypedDict):
    namespaces: list[Namespace]
    namespaces_left: int


class Sums(TypedDict):
    """Of lookups, in all answers that count tokens. tokens: by outcome; bytes: by move."""

    lookups: int
    tokens_asked: int
    tokens: dict[str, int]
    bytes: dict[str, int]
    prefill_s_saved: float


class Hour(Sums):
    hour_s: int
    region: str
    model: str
    tenant: str


class SinceStart(Sums):
    model: str
    tenant: str
    region: str


class Minute(Sums):
    minute_s: int


class Prefix(TypedDict):
    namespace: str
    model: str
    tenant: str
    block_hash: str
    tokens: int
    uses: int
    tokens_saved: int
    error_tokens: int
    first_s: float
    last_s: float
    tiers: list[str]


class EngineReport(TypedDict):
    """since_s, until_s: what the rows are of; the first and the last may be parts of an hour."""

    region: str
    since_s: float
    until_s: float
    rows: list[Hour]
    rows_left: int
    prefixes: list[Prefix]
    holdings: list[Holding]


class Report(EngineReport):
    now_s: float
    gpu_hour_price: float
    currency: str


class Histogram(TypedDict):
    count: int
    sum_s: float
    buckets: list[int]


class ModelLoads(TypedDict):
    """by_source: bytes."""

    count: int
    seconds: float
    by_source: dict[str, int]


class EngineLive(Figures):
    sessions: list[Session]
    sessions_total: int
    model_loads: ModelLoads
    tokens: list[SinceStart]
    prefixes: list[Prefix]
    latencies: dict[str, dict[str, Histogram]]
    latency_bounds_s: Sequence[float]
    holdings: list[Holding]
    minutes: list[Minute]


class Live(Identity, EngineLive):
    health: Health
    problems: list[Problem]
    disks: list[Disk]
    region: dict[str, Any] | None
    events: Events | None
    door: Door


class About(TypedDict):
    """What a rule is about."""

    namespace: str | None
    model: str | None
    tenant: str | None


class Held(TypedDict):
    """Of a pinned prefix; None: too many to count."""

    blocks: int
    held_blocks: int | None
    guarded_blocks: int | None


class Pin(About, Held):
    block_hash: str
    since_s: float


class Ttl(About):
    block_hash: str | None
    ttl_s: float | None
    since_s: float


class UsedBytes(TypedDict):
    dram_used_bytes: int
    nvme_used_bytes: int


class Quota(About, UsedBytes):
    dram_bytes: int | None
    nvme_bytes: int | None
    since_s: float


class PinnedTier(TypedDict):
    tier: str
    pinned_bytes: int
    limit_bytes: int


class Tenant(UsedBytes):
    tenant: str


class Retention(TypedDict):
    pins: list[Pin]
    ttls: list[Ttl]
    quotas: list[Quota]
    pinned: list[PinnedTier]
    tenants: list[Tenant]
