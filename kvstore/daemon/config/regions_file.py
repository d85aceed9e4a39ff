"""The regions file: which regions a deployment has, where their buckets are, and what is copied between them.

    deployment = "acme"

    [regions.na]                       [[rules]]
    url = "s3://acme-kv-na"            from = ["na"]
                                       to = ["eu"]

key_file: a deployment with a key seals what it writes, and believes nothing else (tiers/bucket/seals.py).

One file for all nodes of all regions, and for `kvstore region`, `mirror` and `warm`. deploy/regions.toml explains each key. A
file that is wrong ends in one line for each mistake, which names the file, the key and what is allowed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError

from kvstore.constants import (
    CONFIG_FILE_BYTES_MAX,
    CONFIG_SHOWN_CHARS_MAX,
    DAY_S,
    KIB,
    STALL_S_MAX,
    STALL_S_MIN,
    TIB,
)
from kvstore.daemon.config.config import AbsolutePath, Number, Section, Switch, between, size_between
from kvstore.daemon.config.config_sources import nearest
from kvstore.daemon.config.region_keys import read_seals
from kvstore.errors import StartError
from kvstore.units import parse_bytes
from replication.formats.rules import Rule
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import open_objects
from tiers.bucket.object_urls import is_host_label
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.errors import ObjectRefused
from tiers.reading import Unreadable, as_toml, read_text

# By which clocks differ at most; no less than news takes to be read.
CLOCK_SKEW_S, CLOCK_SKEW_S_MIN = (300.0, 8.0)
BUCKET_STALL_S = 5.0  # one request of a bucket hangs
REGIONS_MAX, COPY_RULES_MAX = 64, 1000  # of one deployment
COPY_BYTES_PER_S_MIN = 64 * KIB

REGION_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
_URL = re.compile(r"(s3|gs|az)://[^/\s@?#]+(/[^\s@?#]*)?|file:///[^\s?#]*")
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+")


class RegionsFileError(StartError):
    """The regions file cannot be used. problems: one line each."""

    heals = False

    def __init__(self, *problems: str, is_missing: bool = False) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.is_missing = is_missing


def _url(value: str) -> str:
    if not _URL.fullmatch(value):
        raise ValueError(
            "allowed are s3://bucket/prefix, gs://…, az://… and file:///directory, without credentials"
        )
    return value


def _endpoint(value: str) -> str:
    if value and not _ENDPOINT.fullmatch(value):
        raise ValueError("allowed are http://host:port and https://host:port, without credentials")
    return value


def _hex(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not re.fullmatch(r"[0-9a-f]{1,32}", value):
            raise ValueError(f"{value!r}: allowed are the first digits of namespace digests, 0-9 and a-f")
    return values


RegionName = Annotated[str, Field(pattern=REGION_NAME)]
Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class Place(Section):
    """A region's bucket."""

    url: Annotated[str, AfterValidator(_url)]
    endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    bucket_region: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9-]*$")] = ""
    path_style: Switch = "auto"
    stall_s: Annotated[Number, between(STALL_S_MIN, STALL_S_MAX)] = BUCKET_STALL_S
    read_through: tuple[RegionName, ...] = ()
    _seals: Seals | None = PrivateAttr(default=None)
    _bound_to: str = PrivateAttr(default="")

    def seal(self, seals: Seals, region: str) -> None:
        """What is read there is believed only where these seal it. region: its name, and that of the deployment."""
        self._seals, self._bound_to = seals, region

    def options(self) -> ObjectOptions:
        """What the bucket is opened with, apart from its URL."""
        return ObjectOptions(
            endpoint=self.endpoint,
            region=self.bucket_region,
            path_style=self._has_path_style() if self.path_style == "auto" else self.path_style == "on",
            allow_http=self.endpoint.startswith("http://"),
            timeout_s=self.stall_s,
        )

    def _has_path_style(self) -> bool:
        """At an endpoint of its own, and wherever the name of the bucket is no name of a host, such as "my.bucket"."""
        return bool(self.endpoint) or not is_host_label(urlsplit(self.url).netloc)

    def open(self, timeout_s_min: float = 0.0) -> Objects:
        """The bucket; asks nobody yet. Raises ObjectRefused."""
        options = self.options()
        options = dataclasses.replace(options, timeout_s=max(options.timeout_s, timeout_s_min))
        objects = open_objects(self.url, options)
        return objects if self._seals is None else SealedObjects(objects, self._seals, self._bound_to)


class CopyRule(Section):
    """What is copied; see `replication.formats.rules`."""

    from_: Annotated[tuple[RegionName, ...], Field(alias="from")] = ()
    to: tuple[RegionName, ...] = ()
    models: Names = ()
    tenants: Names = ()
    namespaces: Annotated[tuple[str, ...], AfterValidator(_hex)] = ()
    what: Literal["kv", "weights"] = "kv"
    action: Literal["copy", "skip"] = "copy"
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    bytes_per_s: Annotated[
        int, BeforeValidator(parse_bytes), size_between(COPY_BYTES_PER_S_MIN, TIB, or_none=True)
    ] = 0

    def rule(self) -> Rule:
        return Rule(
            self.from_, self.to, self.models, self.tenants, self.namespaces,
            self.action == "copy", self.priority, self.bytes_per_s, self.what == "weights",
        )  # fmt: skip


class Deployment(Section):
    """All regions that belong together."""

    deployment: RegionName
    clock_skew_s: Annotated[Number, between(CLOCK_SKEW_S_MIN, DAY_S)] = CLOCK_SKEW_S
    key_file: AbsolutePath | Literal[""] = ""
    regions: Annotated[dict[RegionName, Place], Field(min_length=1, max_length=REGIONS_MAX)]
    rules: Annotated[tuple[CopyRule, ...], Field(max_length=COPY_RULES_MAX)] = ()

    def place(self, region: str, asked_by: str) -> Place:
        """Raises RegionsFileError; asked_by: who names it, such as "region"."""
        if region not in self.regions:
            raise RegionsFileError(f"{asked_by} {region or '(none)'}: known are {', '.join(self.regions)}")
        return self.regions[region]

    def require_openable(self, path: Path, names: Iterable[str]) -> None:
        """Whether these buckets can be opened as the file says. Asks nobody; a directory may be mounted later.

        path: of the file, for the message. Raises RegionsFileError.
        """
        problems = []
        for name in names:
            try:
                if not self.regions[name].url.startswith("file:"):
                    self.regions[name].open()
            except ObjectRefused as error:
                problems.append(f"{path}: regions.{name}: {error}")
        if problems:
            raise RegionsFileError(*problems)

    def copy_rules(self) -> list[Rule]:
        return [rule.rule() for rule in self.rules]


def load_regions(path: Path) -> Deployment:
    """Raises RegionsFileError with every problem found."""
    try:
        said = as_toml(path, read_text(path, CONFIG_FILE_BYTES_MAX))
    except Unreadable as error:
        raise RegionsFileError(str(error), is_missing=error.is_missing) from error
    try:
        deployment = Deployment.model_validate(said)
    except ValidationError as error:
        raise RegionsFileError(*(_problem(path, each) for each in error.errors())) from error
    if problems := list(_misfits(deployment)):
        raise RegionsFileError(*(f"{path}: {problem}" for problem in problems))
    _seal(path, deployment)
    return deployment


def _seal(path: Path, deployment: Deployment) -> None:
    """All buckets, where there is a key. Raises RegionsFileError."""
    if not deployment.key_file:
        return
    try:
        seals = read_seals(Path(deployment.key_file))
    except Unreadable as error:
        raise RegionsFileError(f"{path}: key_file: {error}", is_missing=error.is_missing) from error
    for name, place in deployment.regions.items():
        place.seal(seals, f"{deployment.deployment}/{name}")


def _misfits(deployment: Deployment) -> list[str]:
    problems = []
    owners: dict[tuple[str, str], str] = {}
    for name, place in deployment.regions.items():
        other = owners.setdefault((place.endpoint, place.url.rstrip("/")), name)
        if other != name:
            problems.append(f"regions.{name}.url: {place.url}: is that of region {other}; each needs its own")
    problems += _misfits_of_rules(deployment)
    known = ", ".join(deployment.regions)
    for region, place in deployment.regions.items():
        for name, count in Counter(place.read_through).items():
            if name not in deployment.regions:
                problems.append(f"regions.{region}.read_through: {name}: known regions are {known}")
            if name == region:
                problems.append(
                    f"regions.{region}.read_through: {name}: is the region itself; allowed are others"
                )
            if count > 1:
                problems.append(
                    f"regions.{region}.read_through: {name}: is named {count} times; once is allowed"
                )
    return problems


def _misfits_of_rules(deployment: Deployment) -> list[str]:
    problems = []
    known = ", ".join(deployment.regions)
    for number, rule in enumerate(deployment.rules, 1):
        for key in ("tenants", "namespaces"):
            if rule.what == "weights" and getattr(rule, key):
                problems.append(f"rules[{number}].{key}: weights have none: allowed is models")
        for key, names in (("from", rule.from_), ("to", rule.to)):
            for name in names:
                if name not in deployment.regions:
                    problems.append(f"rules[{number}].{key}: {name}: known regions are {known}")
    return problems


def _keys(place: Sequence[str | int]) -> list[str]:
    """What may stand where something else does."""
    inner: dict[object, type[Section]] = {"regions": Place, "rules": CopyRule}
    of = inner[place[0]] if len(place) > 1 else Deployment
    return [field.alias or name for name, field in of.model_fields.items()]


def _problem(path: Path, error: object) -> str:
    assert isinstance(error, dict)
    where = ".".join(
        f"[{part + 1}]" if isinstance(part, int) else str(part) for part in error["loc"]
    ).replace(".[", "[")
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{path}: {where}: unknown key: {nearest(str(error['loc'][-1]), _keys(error['loc']))}"
    if error["type"] == "missing":
        return f"{path}: {where}: is missing"
    if error["type"] in ("dict_type", "model_type"):
        return f"{path}: {where}: is no table"
    message = message[:1].lower() + message[1:]
    if error["loc"][-1] in ("url", "endpoint"):  # somebody may have put a password there
        return f"{path}: {where}: {message}"
    return f"{path}: {where}: {repr(error['input'])[:CONFIG_SHOWN_CHARS_MAX]}: {message}"
