"""The settings of the daemon: what there is, what is allowed, how they must fit together.

    defaults ◀ file (TOML) ◀ environment (KVSTORE_SECTION__KEY) ◀ flags (--set section.key=value)

This module is the schema; `kvstore.daemon.config.config_sources` reads the layers and remembers where
each value came from. Units close the names. Every key does something, and what a key is
for is written down once, in `deploy/kvstore.toml`.

A wrong setting stops the program and names the key, the value, where it stands and what
is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.constants import (
    CONNECTIONS_MAX_MAX,
    DAY_S,
    DOOR_CONNECTIONS_MAX,
    DOOR_LEASE_SHARE_MAX,
    DOOR_SLOW_S,
    GIB,
    HOUR_S,
    IO_THREADS_MAX,
    KIB,
    MIB,
    NVME_CAPACITY_BYTES_MAX,
    NVME_CAPACITY_BYTES_MIN,
    PINNED_SHARE_DEFAULT,
    PREFILL_TOKENS_PER_S_MAX,
    SOCKET_PATH_BYTES_MAX,
    STALL_S,
    STALL_S_MAX,
    STALL_S_MIN,
    TIB,
    require,
)
from kvstore.daemon.listening import parse_listen
from kvstore.protocol.places import default_data_dir, default_socket
from kvstore.security.tls import TlsFiles
from kvstore.units import exact_bytes, parse_bytes
from replication.formats.manifests import is_model_name
from tiers.constants import ROW_BYTES, SLAB_ALIGN_BYTES, SLOT_BYTES_MIN

DRAM_CAPACITY_BYTES_MIN, DRAM_CAPACITY_BYTES_MAX = 4 * MIB, 64 * TIB
SLAB_BYTES_MAX = 256 * MIB  # what one slab's slot numbers can address at 4 KiB a slot
SLOT_BYTES_MIN_MIN, SLOT_BYTES_MIN_MAX = 4 * KIB, 16 * MIB
NVME_DIRECTORIES_MAX = 64
STOP_TIMEOUT_S_MAX = 3600
GPU_HOUR_PRICE_MAX = 1_000_000.0
NVME_WRITE_BYTES_MIN = 1 * GIB  # a day; less would not pay for a handful of records
LEASES_MAX_MAX = 65536
DOOR_LEASES_MAX = 1024  # per connection
EVENTS_INTERVAL_S_MIN, EVENTS_INTERVAL_S_MAX = 0.001, 60.0
EVENTS_REPLAY_BYTES_MIN = 64 * KIB
EVENTS_TOPIC_CHARS_MAX = 256
MODELS_PRELOAD_MAX = 64
GRPC_STREAMS_MAX = 1024
SEEN_TIMES_MAX, DEMAND_S_MAX = 1_000_000, 365 * DAY_S
PERSIST_BYTES_PER_S_MIN, PACK_BYTES_MIN, PACK_BYTES_MAX = 64 * KIB, 64 * KIB, 512 * MIB
require(
    SLAB_ALIGN_BYTES <= SLAB_BYTES_MAX and SLAB_BYTES_MAX % SLAB_ALIGN_BYTES == 0,
    "slabs are whole huge pages",
)
require(SLAB_BYTES_MAX <= DRAM_CAPACITY_BYTES_MAX, "a slab fits into the largest arena")
require(DRAM_CAPACITY_BYTES_MIN >= SLAB_ALIGN_BYTES, "the smallest arena holds a slab")
require(NVME_CAPACITY_BYTES_MIN >= SLAB_ALIGN_BYTES, "the smallest NVMe directory holds a slab")
require(SLOT_BYTES_MIN_MIN <= SLOT_BYTES_MIN_MAX <= SLAB_BYTES_MAX, "the smallest slot fits into a slab")
require(
    DOOR_CONNECTIONS_MAX <= CONNECTIONS_MAX_MAX and DOOR_LEASES_MAX <= LEASES_MAX_MAX, "defaults are allowed"
)

DEFAULT_FILE = Path("/etc/kvstore/kvstore.toml")


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a number: true and false are not allowed here")
    return value


def _switched(value: object) -> object:
    words = {"true": True, "on": True, "false": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("allowed are true and false")
    return value


def between(low: float, high: float) -> AfterValidator:
    def validate(value: float) -> float:
        if not low <= value <= high:  # also refuses nan
            raise ValueError(f"allowed are {low} to {high}")
        return value

    return AfterValidator(validate)


def size_between(low: int, high: int, or_none: bool = False) -> AfterValidator:
    """or_none: 0 stands for no limit."""

    def validate(value: int | str) -> int | str:
        if isinstance(value, int) and not low <= value <= high and not (or_none and value == 0):
            no_limit = "0 (no limit), and " if or_none else ""
            raise ValueError(f"allowed are {no_limit}{exact_bytes(low)} to {exact_bytes(high)}")
        return value

    return AfterValidator(validate)


def _size_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f'{error}, and "auto"' if "allowed" in str(error) else str(error)) from error


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("not an absolute path")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in str(value)):  # they would split log lines
        raise ValueError("a path with control characters")
    return value


def _socket_fits(value: Path) -> Path:
    if len(bytes(value)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"{len(bytes(value))} bytes long: the kernel allows {SOCKET_PATH_BYTES_MAX}")
    return value


def _listed(value: object) -> object:
    """The environment and --set have no arrays: "a,b" is a list of two, "" an empty one."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


_TCP = re.compile(r"tcp://(?:\[(?P<six>[^]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5})")


def binds(endpoint: str) -> bool:
    """Whether an endpoint is one of this node (an address, * or a socket file), and not the name of another."""
    tcp = _TCP.fullmatch(endpoint)
    return tcp is None or tcp["host"] == "*" or _is_address(tcp["six"] or tcp["host"])


def is_open(endpoint: str) -> bool:
    """Whether other machines may reach it."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or not binds(endpoint):
        return False
    return tcp["host"] == "*" or not ip_address(tcp["six"] or tcp["host"]).is_loopback


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _endpoint(value: str) -> str:
    """ZeroMQ would take more, and say less of what is wrong."""
    path = value.removeprefix("ipc://")
    if path != value:
        if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"allowed is ipc:// and an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes"
            )
    elif value:
        tcp = _TCP.fullmatch(value)
        if tcp is None or not 1 <= int(tcp["port"]) <= 65_535 or (tcp["six"] and not _is_address(tcp["six"])):
            raise ValueError(
                'allowed are "", tcp://ADDRESS:PORT, tcp://*:PORT, tcp://NAME:PORT and ipc:///PATH, '
                "with ports 1 to 65535"
            )
    return value


def _listen(value: str) -> str:
    if value:
        try:
            parse_listen(value)
        except ValueError as error:
            raise ValueError(f'{error}, and "" (off)') from error
    return value


def _collector(value: str) -> str:
    if not value:
        return value
    allowed = 'allowed are "" (off) and http:// or https://HOST[:PORT][/PATH], without a user and a query'
    try:
        url = urlsplit(value)
        is_fine = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError as error:  # of a port, or of brackets
        raise ValueError(allowed) from error
    if not is_fine or "@" in url.netloc or url.query or url.fragment or not _PLAIN.fullmatch(value):
        raise ValueError(allowed)
    return value if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/traces"


_PLAIN = re.compile(r"[!-~]+")  # ASCII that can be seen
Switch = Literal["auto", "on", "off"]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
SocketPath = Annotated[Path, AfterValidator(_absolute), AfterValidator(_socket_fits)]
Flag = Annotated[bool, BeforeValidator(_switched)]
Count = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Size = Annotated[int, BeforeValidator(parse_bytes)]
SlabBytes = Annotated[Size, size_between(SLAB_ALIGN_BYTES, SLAB_BYTES_MAX)]


class Section(BaseModel):
    """Base of all sections: immutable, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Log(Section):
    """What the daemon logs to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Dram(Section):
    """The arena in shared memory."""

    capacity_bytes: Annotated[
        int | Literal["auto"],
        BeforeValidator(_size_or_auto),
        size_between(DRAM_CAPACITY_BYTES_MIN, DRAM_CAPACITY_BYTES_MAX),
    ] = "auto"
    when_short: Literal["refuse", "shrink"] = "refuse"
    slab_bytes: SlabBytes = 64 * MIB
    slot_bytes_min: Annotated[Size, size_between(SLOT_BYTES_MIN_MIN, SLOT_BYTES_MIN_MAX)] = 16 * KIB
    huge_pages: Switch = "auto"
    directory: AbsolutePath | Literal["auto"] = "auto"
    prefault: Flag = True
    keep_on_stop: Flag = True
    verify_share: Annotated[Number, between(0, 1)] = 0.01


def _model(value: str) -> str:
    model, at, revision = value.partition("@")
    if not is_model_name(model) or (at and not is_model_name(revision)):
        raise ValueError(
            f"{value[:100]!r}: allowed are NAME and NAME@REVISION, each of a-z 0-9 . _ - and at most 96 of them"
        )
    return value


class Models(Section):
    """Weights of models on this node."""

    dir: AbsolutePath | Literal["auto"] = "auto"
    nvme_bytes: Annotated[Size, size_between(MIB, NVME_CAPACITY_BYTES_MAX, or_none=True)] = 0
    preload: Annotated[
        tuple[Annotated[str, AfterValidator(_model)], ...],
        BeforeValidator(_listed),
        Field(max_length=MODELS_PRELOAD_MAX),
    ] = ()
    orders: Literal["off", "on"] = "off"
    cache_key_file: AbsolutePath | Literal[""] = ""
    dram_bytes: Annotated[Size, size_between(0, DRAM_CAPACITY_BYTES_MAX)] = 0


class Nvme(Section):
    """Slot files on local disks; without directories there is no such tier."""

    directories: Annotated[
        tuple[AbsolutePath, ...], BeforeValidator(_listed), Field(max_length=NVME_DIRECTORIES_MAX)
    ] = ()
    capacity_bytes: Annotated[Size, size_between(NVME_CAPACITY_BYTES_MIN, NVME_CAPACITY_BYTES_MAX)] = 64 * GIB
    slab_bytes: SlabBytes = 64 * MIB
    direct: Switch = "auto"
    write_bytes_per_day: Annotated[
        Size, size_between(NVME_WRITE_BYTES_MIN, NVME_CAPACITY_BYTES_MAX, or_none=True)
    ] = 0
    stall_s: Annotated[Number, between(STALL_S_MIN, STALL_S_MAX)] = STALL_S


class Engine(Section):
    """How bytes move between the tiers, and which leave."""

    policy: Literal["lru", "kvstore"] = "kvstore"
    io_threads: Annotated[Count, between(1, IO_THREADS_MAX)] = 4
    prefill_tokens_per_s: Annotated[Number, between(0, PREFILL_TOKENS_PER_S_MAX)] = 0.0


class Door(Section):
    """What the processes that attach here may take."""

    connections_max: Annotated[Count, between(1, CONNECTIONS_MAX_MAX)] = DOOR_CONNECTIONS_MAX
    leases_max: Annotated[Count, between(2, LEASES_MAX_MAX)] = DOOR_LEASES_MAX
    lease_share_max: Annotated[Number, between(0.01, 1.0)] = DOOR_LEASE_SHARE_MAX
    slow_s: Annotated[Number, between(0.001, 3600)] = DOOR_SLOW_S


class Report(Section):
    """What saved prefill is worth, in reports."""

    gpu_hour_price: Annotated[Number, between(0, GPU_HOUR_PRICE_MAX)] = 0.0
    currency: Annotated[str, Field(min_length=1, max_length=8)] = "USD"


class Durable(Section):
    """What is persisted in the region's bucket."""

    rule: Literal["seen", "cost", "off"] = "seen"
    seen_times: Annotated[Count, between(1, SEEN_TIMES_MAX)] = 2
    seen_within_s: Annotated[Number, between(1, DEMAND_S_MAX)] = DAY_S
    keep_s: Annotated[Number, between(60, DEMAND_S_MAX)] = 7 * DAY_S
    half_life_s: Annotated[Number, between(1, DEMAND_S_MAX)] = 6 * HOUR_S
    bytes_per_s: Annotated[Size, size_between(PERSIST_BYTES_PER_S_MIN, TIB)] = 128 * MIB
    pack_bytes: Annotated[Size, size_between(PACK_BYTES_MIN, PACK_BYTES_MAX)] = 16 * MIB
    compression: Literal["off", "split-zstd"] = "off"
    storage_gb_month_price: Annotated[Number, between(0, GPU_HOUR_PRICE_MAX)] = 0.023
    put_million_price: Annotated[Number, between(0, GPU_HOUR_PRICE_MAX)] = 5.0
    copy_gb_price: Annotated[Number, between(0, GPU_HOUR_PRICE_MAX)] = 0.0
    found_nowhere_share: Annotated[Number, between(0, 1)] = 0.1


class Retention(Section):
    """What pins may take."""

    pinned_share_max: Annotated[Number, between(0, 0.9)] = PINNED_SHARE_DEFAULT


class Events(Section):
    """What routers are told of the blocks that are held."""

    endpoint: Endpoint = ""
    replay_endpoint: Endpoint = ""
    topic: Annotated[str, Field(max_length=EVENTS_TOPIC_CHARS_MAX)] = ""
    hash: Literal["int", "bytes"] = "int"
    interval_s: Annotated[Number, between(EVENTS_INTERVAL_S_MIN, EVENTS_INTERVAL_S_MAX)] = 0.1
    replay_bytes: Annotated[Size, size_between(EVENTS_REPLAY_BYTES_MIN, TIB)] = 64 * MIB


class Web(Section):
    """Metrics, health and the live page, by a process beside the daemon."""

    listen: Annotated[str, AfterValidator(_listen)] = "127.0.0.1:9471"
    names: Literal["user", "all"] = "user"


class Grpc(Section):
    """The API for other services, by a process beside the daemon."""

    listen: Annotated[str, AfterValidator(_listen)] = ""
    connection_age_s: Annotated[Number, between(10, DAY_S)] = 600.0
    streams_max: Annotated[int, BeforeValidator(_no_bool), between(1, GRPC_STREAMS_MAX)] = 16
    publish_from: Annotated[tuple[AbsolutePath, ...], BeforeValidator(_listed)] = ()


class Security(Section):
    """Who comes in through doors that others than this machine can reach, and what they may."""

    certificate_file: AbsolutePath | Literal[""] = ""
    key_file: AbsolutePath | Literal[""] = ""
    ca_file: AbsolutePath | Literal[""] = ""
    access_file: AbsolutePath | Literal[""] = ""
    plain: Annotated[tuple[Literal["web", "events"], ...], BeforeValidator(_listed)] = ()

    @property
    def tls_files(self) -> TlsFiles | None:
        """None: no certificates."""
        if not (self.certificate_file and self.key_file and self.ca_file):
            return None
        return TlsFiles(self.certificate_file, self.key_file, self.ca_file)


class Traces(Section):
    """Spans of requests, for OpenTelemetry."""

    endpoint: Annotated[str, AfterValidator(_collector)] = ""
    sample: Annotated[Number, between(0, 1)] = 0.0


class Config(Section):
    """Every setting of `kvstore serve`."""

    data_dir: AbsolutePath = Field(default_factory=lambda: Path(default_data_dir()))
    socket_path: SocketPath = Field(default_factory=lambda: Path(default_socket()))
    region: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    regions_file: AbsolutePath | Literal[""] = ""
    stop_timeout_s: Annotated[Number, between(0, STOP_TIMEOUT_S_MAX)] = 20.0
    log: Log = Log()
    dram: Dram = Dram()
    nvme: Nvme = Nvme()
    models: Models = Models()
    engine: Engine = Engine()
    door: Door = Door()
    report: Report = Report()
    retention: Retention = Retention()
    durable: Durable = Durable()
    events: Events = Events()
    web: Web = Web()
    grpc: Grpc = Grpc()
    security: Security = Security()
    traces: Traces = Traces()

    @property
    def web_tls(self) -> TlsFiles | None:
        """The page's certificates; None: it is HTTP."""
        return None if "web" in self.security.plain else self.security.tls_files

    @property
    def models_dir(self) -> Path:
        """Where models lie on this node."""
        return self.data_dir / "models" if self.models.dir == "auto" else self.models.dir


def sections() -> dict[str, type[Section]]:
    """The tables of the file, by name."""
    return {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def keys() -> dict[str, type[Section]]:
    """Every key as "section.key" ("key" at the top), with the section it belongs to."""
    tables = sections()
    found: dict[str, type[Section]] = {name: Config for name in Config.model_fields if name not in tables}
    for table, section in tables.items():
        found.update({f"{table}.{name}": section for name in section.model_fields})
    return found


def value_of(config: Config, key: str) -> Any:
    """The value of "section.key" as the program sees it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def misfits(config: Config) -> Iterator[tuple[str, str]]:
    """Values that are fine alone and wrong together: (key, what is wrong and what is allowed)."""
    dram, nvme = config.dram, config.nvme
    for name, slab_bytes, capacity_bytes in (
        ("dram", dram.slab_bytes, dram.capacity_bytes),
        ("nvme", nvme.slab_bytes, nvme.capacity_bytes),
    ):
        if slab_bytes % SLAB_ALIGN_BYTES:
            yield f"{name}.slab_bytes", f"allowed are multiples of {exact_bytes(SLAB_ALIGN_BYTES)}"
        if isinstance(capacity_bytes, int) and capacity_bytes < slab_bytes:
            yield (
                f"{name}.capacity_bytes",
                f"must hold one slab ({name}.slab_bytes = {exact_bytes(slab_bytes)})",
            )
    if nvme.directories and nvme.slab_bytes < dram.slab_bytes:
        yield "nvme.slab_bytes", f"must be at least dram.slab_bytes ({exact_bytes(dram.slab_bytes)})"
    row_bytes = nvme.slab_bytes // SLOT_BYTES_MIN * ROW_BYTES
    if nvme.slab_bytes <= nvme.capacity_bytes < nvme.slab_bytes + row_bytes:
        least = exact_bytes(nvme.slab_bytes + row_bytes)
        yield "nvme.capacity_bytes", f"allowed are at least {least}: one nvme.slab_bytes and its rows"
    if isinstance(dram.capacity_bytes, int) and config.models.dram_bytes > dram.capacity_bytes:
        most = exact_bytes(dram.capacity_bytes)
        yield "models.dram_bytes", f"a part of dram.capacity_bytes: allowed are 0 to {most}"
    if dram.slot_bytes_min % SLOT_BYTES_MIN_MIN or dram.slot_bytes_min > dram.slab_bytes:
        yield (
            "dram.slot_bytes_min",
            f"allowed are multiples of {exact_bytes(SLOT_BYTES_MIN_MIN)} up to dram.slab_bytes",
        )
    if config.regions_file and not config.region:
        yield "region", "which of the regions in regions_file this node is in: it must be set"
    yield from _preload_misfits(config)
    if config.durable.rule == "cost" and not config.report.gpu_hour_price:
        yield "durable.rule", 'with "cost", report.gpu_hour_price must be set'
    yield from _event_misfits(config.events)
    yield from _door_misfits(config)
    if len(set(nvme.directories)) < len(nvme.directories):
        yield "nvme.directories", "the same directory is listed twice"
    if config.data_dir in nvme.directories:
        yield (
            "nvme.directories",
            f"data_dir ({config.data_dir}) has files of its own: use one below it or elsewhere",
        )


def _preload_misfits(config: Config) -> Iterator[tuple[str, str]]:
    names = config.models.preload
    if names and not config.regions_file:
        yield "models.preload", "they come from the bucket of a region: regions_file must be set"
    if config.models.orders == "on" and not config.regions_file:
        yield "models.orders", "they lie in the bucket of a region: regions_file must be set"
    if len(set(names)) < len(names):
        yield "models.preload", "a model is listed twice"


def _event_misfits(events: Events) -> Iterator[tuple[str, str]]:
    if events.replay_endpoint and not events.endpoint:
        yield "events.replay_endpoint", "there is nothing to replay: events.endpoint must be set"
    elif events.endpoint and events.endpoint == events.replay_endpoint:
        yield "events.replay_endpoint", "must not be that of events.endpoint"
    elif not binds(events.replay_endpoint):
        yield (
            "events.replay_endpoint",
            "must be one of this node: allowed are tcp://ADDRESS:PORT, tcp://*:PORT and ipc:///PATH",
        )


def _door_misfits(config: Config) -> Iterator[tuple[str, str]]:
    """Nobody comes near from another machine without a certificate, unless that was meant."""
    s, events = config.security, config.events
    files = {"certificate_file": s.certificate_file, "key_file": s.key_file, "ca_file": s.ca_file}
    missing = [name for name, value in files.items() if not value]
    if missing and len(missing) < len(files):
        yield f"security.{missing[0]}", f"{', '.join(files)}: allowed are all three, and none"
        return
    for door, listen in (("web", config.web.listen), ("grpc", config.grpc.listen)):
        if listen and not parse_listen(listen).is_loopback and missing and door not in s.plain:
            plain = f', security.plain = ["{door}"]' if door == "web" else ""
            certificates = "certificates (security.certificate_file, key_file and ca_file)"
            yield (
                f"{door}.listen",
                f"beyond this machine allowed with {certificates}{plain}; else 127.0.0.1:PORT",
            )
    for key, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
        if is_open(endpoint) and "events" not in s.plain:
            yield (
                f"events.{key}",
                'beyond this machine allowed with security.plain = ["events"]; else tcp://127.0.0.1:PORT, ipc://',
            )
