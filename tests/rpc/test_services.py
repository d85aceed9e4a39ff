"""ModelService, RegionService, ReportService and NodeService, as a client sees them that knows nothing but reflection: against a real
daemon of a region in a directory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.client import Client
from kvstore.ledger import report
from kvstore.ledger.sums import EVERYBODY_ELSE
from kvstore.tools.rpc.calls import FOR_TENANTS
from tests.region.regions import arguments, chain, init, read, regions_file, space_of, store, until
from tests.rpc.reflecting import Reflecting
from tests.running import ROOT, TIMEOUT_S, Place, daemons, environment, kvstore

ROLES = {
    "viewer": ["read"],
    "admin": ["admin"],
    "publisher": ["publisher"],
    "acme": ["read"],
    "rival": ["write"],
}
TENANTS = ("acme", "rival")
SERVICES = ("ModelService", "RegionService", "ReportService", "NodeService")


def access_file(path: Path) -> Path:
    """Everybody of ROLES, whose token is their name."""
    lines = []
    for name, roles in ROLES.items():
        lines += ["[[grant]]", f'token_sha256 = "{sha256(name.encode()).hexdigest()}"']
        lines += [f'label = "{name}"', f"roles = {json.dumps(roles)}"]
        lines += [f'tenant = "{name}"'] if name in TENANTS else []
    file = path / "access.toml"
    file.write_text("\n".join([*lines, ""]))
    return file


@dataclass
class World:
    place: Place
    regions: Path
    process: subprocess.Popen[str]
    target: str
    source: Path  # of a model
    errors: Path

    def as_(self, who: str) -> Reflecting:
        """ "": the user of this process."""
        return Reflecting(self.target, who)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A daemon of region na, its gRPC process, and two tenants that asked for three blocks each of which one had been stored."""
    path = tmp_path_factory.mktemp("world")
    place, file = Place(path), regions_file(path, "na", "eu")
    init(file, "na", "eu")
    source = path / "models" / "tiny"
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"model_type": "tiny"}')
    (source / "weights.bin").write_bytes(os.urandom(1 << 20))
    more = [f"--set=grpc.publish_from={source.parent}", "--set=models.dir=" + str(path / "here")]
    words = [
        *arguments(place, file, "na", *more),
        "--set=dram.capacity_bytes=32MiB",
        "--set=models.dram_bytes=8MiB",
    ]
    with daemons(path) as start:
        start(place, *words)
        with Client(place.socket, 10.0, label="an engine") as client:
            for number, tenant in enumerate(TENANTS, 1):
                space, hashes = space_of(client, tenant), chain(tenant, 3)
                store(client, space, hashes[:number])
                client.lookup([space], hashes, ticket=number, tokens=3 * 64)
                read(client, space, hashes[:number])
        command = ["grpc", "--listen=127.0.0.1:0", f"--socket={place.socket}"]
        command += [f"--set=security.access_file={access_file(path)}"]
        with open(path / "errors", "w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
            )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.match(r"ready grpc=(\S+)", ready)
            assert found, ready
            yield World(place, file, process, found[1], source, path / "errors")
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def admin(world: World) -> Iterator[Reflecting]:
    client = world.as_("admin")
    yield client
    client.close()


def document(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer["document_json"])
    return found


def ended(client: Reflecting, answer: dict[str, Any]) -> dict[str, Any]:
    """An operation that has just begun, at its end."""
    begun = answer["operation"]
    *_, last = client.stream("NodeService/WatchOperation", id=begun["id"])
    told: dict[str, Any] = last["operation"]
    assert told["method"] == begun["method"]
    return told


def done(client: Reflecting, answer: dict[str, Any]) -> dict[str, Any]:
    """The document of one that succeeds."""
    told = ended(client, answer)
    assert told["state"] == "STATE_DONE", told.get("problem")
    return document(told)


def asked(world: World, *words: str) -> dict[str, Any]:
    """What the command prints."""
    answer = kvstore(
        *words,
        "-o",
        "json",
        f"--set=regions_file={world.regions}",
        "--set=region=na",
        f"--socket={world.place.socket}",
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_a_model_from_a_directory_into_dram_and_away(world: World, admin: Reflecting) -> None:
    """Published, listed, shown, verified, preloaded, pinned, loaded, and all of it undone: each call does what its command does,
    and answers with its document."""
    published = done(
        admin,
        admin.call("ModelService/PublishModel", directory=str(world.source), name="tiny", revision="r1"),
    )
    assert (published["model"], published["revision"], published["put_chunks"]) == ("tiny", "r1", 2)
    listed = document(admin.call("ModelService/ListModels"))
    assert listed == asked(world, "model", "ls") and listed["revisions"][0]["published_by"] == "admin"
    assert document(admin.call("ModelService/ListModels", model="tiny")) == listed
    shown = document(admin.call("ModelService/GetModel", model="tiny"))
    assert shown == asked(world, "model", "show", "tiny@r1")
    assert done(admin, admin.call("ModelService/VerifyModel", model="tiny", deep=True))["read_bytes"]
    told = ended(admin, admin.call("ModelService/PreloadModel", model="tiny", verify=True))
    here = document(told)
    assert (Path(here["path"]) / "weights.bin").read_bytes() == (world.source / "weights.bin").read_bytes()
    assert told["progress"].startswith("tiny: ")
    assert document(admin.call("ModelService/ListModels", local=True))["revisions"][0]["path"] == here["path"]
    admin.call("ModelService/PinModel", model="tiny")
    code, reason, message = admin.refused("ModelService/EvictModel", model="tiny")
    assert (code, reason) == ("FAILED_PRECONDITION", "FAILED") and "pinned" in message
    admin.call("ModelService/UnpinModel", model="tiny")
    assert done(admin, admin.call("ModelService/LoadModel", model="tiny"))["by_source"]
    assert [one["name"] for one in document(admin.call("NodeService/GetNode"))["models"]] == ["tiny"]
    admin.call("ModelService/UnloadModel", model="tiny")
    assert admin.refused("ModelService/UnloadModel", model="tiny")[:2] == ("NOT_FOUND", "NOT_FOUND")
    admin.call("ModelService/EvictModel", model="tiny@r1")
    assert done(admin, admin.call("ModelService/RemoveModel", model="tiny@r1", days=1))["removed"] == [
        "tiny@r1"
    ]
    collected = done(admin, admin.call("ModelService/CollectModels", dry_run=True, grace="0s"))
    assert (collected["deleted"], collected["dry_run"]) == (2, True)


def test_regions(world: World, admin: Reflecting) -> None:
    """Regions are listed and verified, warming is planned, ordered and taken back, and a tenant is erased: as the commands do."""
    assert document(admin.call("RegionService/ListRegions")) == asked(world, "region", "ls")
    there = document(admin.call("RegionService/GetRegions", region="na", live=True))
    here = asked(world, "region", "status", "na", "--now")
    for keeper in (*there["keepers"], *here["keepers"]):
        del keeper["kept_s"], keeper["age_s"]  # at two moments
    assert there == here
    assert done(admin, admin.call("RegionService/VerifyRegion", region="na", deep=True, share=0.5))["ok"]
    lacking = ended(admin, admin.call("RegionService/VerifyRegion", region="nowhere"))
    assert (lacking["state"], lacking["exit_code"]) == ("STATE_FAILED", 2)
    assert lacking["problem"] == "region verify: NAME nowhere: known are na, eu"
    warming = {"region": "na", "models": ["a *"], "in_force": "60s"}
    code, reason, message = admin.refused("RegionService/PlanWarming", warming=warming)
    assert (code, reason) == ("NOT_FOUND", "NOT_FOUND") and "nothing is durable there" in message
    code, reason, message = admin.refused("RegionService/CancelWarming", warming=warming)
    assert (code, reason) == ("NOT_FOUND", "NOT_FOUND") and "no such order" in message
    failed = ended(admin, admin.call("RegionService/WarmRegion", warming=warming, wait="0s"))
    assert failed["exit_code"] == 3
    erasure: Any = {"tenant": "nobody", "regions": ["eu"], "days": 1}
    known = {**erasure, "only_known": True}
    assert admin.refused("RegionService/PlanErasure", erasure=known)[0] == "NOT_FOUND"
    planned = document(admin.call("RegionService/PlanErasure", erasure=erasure))
    assert [(row["state"], row["packs"]) for row in planned["regions"]] == [("ready", 0)]
    erased = done(admin, admin.call("RegionService/EraseRegions", **erasure))
    assert [row["state"] for row in erased["regions"]] == ["buried"]
    assert document(admin.call("RegionService/ListErasures")) == asked(world, "region", "erase", "--ls")
    back = document(admin.call("RegionService/CancelErasure", tombstone=erased["tombstone"]))
    assert [row["state"] for row in back["regions"]] == ["not there", "taken back"]


def test_the_node(world: World, admin: Reflecting) -> None:
    """Status, settings, the check and who asks are those of the commands; a setting is changed."""
    node = admin.call("NodeService/GetNode")
    status = asked(world, "status")
    assert (node["instance"], node["region"]) == (status["daemon"]["instance"], "na")
    assert document(node).keys() == status.keys()
    assert document(admin.call("NodeService/ListSettings", name="log")) == asked(
        world, "config", "get", "log"
    )
    changed = document(admin.call("NodeService/ChangeSetting", key="log.level", value="debug"))
    assert (changed["before"], changed["value"]) == ("info", "debug")
    code, reason, _ = admin.refused("NodeService/ChangeSetting", key="log.level", value="-o")
    assert (code, reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")
    assert admin.call("NodeService/CheckNode") == {}
    who = world.as_("acme").call("NodeService/GetPrincipal")
    assert who == {"name": "acme", "may": ["read", "view"], "tenant": "acme"}
    assert "admin" in world.as_("").call("NodeService/GetPrincipal")["may"]


def test_reports(world: World, admin: Reflecting) -> None:
    """The report and the figures are those of the commands."""
    told, printed = (
        document(admin.call("ReportService/GetReport", since="3600s")),
        asked(world, "report", "--since", "1h"),
    )
    assert told["totals"] == printed["totals"] and told["totals"]["lookups"] == 2
    assert told["by"] == printed["by"]
    assert document(admin.call("ReportService/GetReport", by_minute=True))["by"]["minute"]
    figures = next(admin.stream("ReportService/WatchFigures"))
    assert document(figures).keys() == asked(world, "top").keys()
    code, _, message = admin.refused("ReportService/WatchFigures", interval="0.5s")
    assert code == "INVALID_ARGUMENT" and "allowed are 1 s to 60 s" in message


@pytest.mark.parametrize(("tenant", "other", "held"), [("acme", "rival", 1), ("rival", "acme", 2)])
def test_a_tenant_sees_only_its_own(world: World, tenant: str, other: str, held: int) -> None:
    """Of reports, figures and namespaces a tenant gets its own rows, and nothing of another one's, nor of the node's."""
    client = world.as_(tenant)
    reported = client.call("ReportService/GetReport", by_minute=True)
    told = document(reported)
    assert (told["totals"]["lookups"], told["totals"]["hit_tokens"]) == (1, held * 64)
    assert [row["tenant"] for row in told["by"]["tenant"]] == [tenant]
    assert {row["tenant"] for row in told["prefixes"]} == {tenant}
    assert "minute" not in told["by"] and not told["gpu_hour_price"]
    node = client.call("NodeService/GetNode")
    assert [space["fields"]["tenant"] for space in document(node)["namespaces"]] == [tenant]
    assert document(node).keys() == {"namespaces"}
    figured = next(client.stream("ReportService/WatchFigures"))
    figures = document(figured)
    assert [row["tenant"] for row in figures["models"]] == [tenant]
    assert not figures.keys() & {
        "tiers",
        "latencies",
        "attention",
        "sessions_total",
        "namespaces_total",
        "health",
    }
    for answer in (reported, node, figured):
        text = json.dumps(answer)
        assert tenant in text and other not in text
        assert not re.search("an engine|/tmp|dram_used", text)


def test_what_is_nobodys_in_particular_is_not_for_a_tenant(world: World, admin: Reflecting) -> None:
    """A tenant has the calls that answer with its own, and is refused every other one, whatever it asks: those that there will
    be, too. What is there and what is not are the same to it."""
    begun = admin.call("ModelService/VerifyModel")["operation"]
    client = world.as_("acme")
    refused = {
        name for name in client.methods() if name not in FOR_TENANTS and not name.startswith("Health/")
    }
    assert {"CacheService/ListRules", "ModelService/ListModels", "NodeService/ListOperations"} < refused
    for name in sorted(refused):
        request = {"id": begun["id"]} if name.endswith("Operation") else {}
        code, reason, _ = client.refused(name, **request)
        assert (code, reason) == ("PERMISSION_DENIED", "NOT_ALLOWED"), name
    assert ended(admin, {"operation": begun})["state"] == "STATE_DONE"


def test_roles_refuse(world: World, admin: Reflecting) -> None:
    """Every call of these services is refused to who has not the right to it, before anything of it is looked at."""
    rights = {
        method: re.search(r"Needs(?:: (\w+)| what)", comment)
        for method, comment in _comments().items()
        if method.partition("/")[0] in SERVICES
    }
    methods = {name for name in admin.methods() if name.partition("/")[0] in SERVICES}
    assert set(rights) == methods, "each says what it needs"
    for who, may in (("viewer", {"view"}), ("publisher", {"view", "publisher"})):
        client = world.as_(who)
        for method, needs in rights.items():
            if needs is not None and needs[1] is not None and needs[1] not in may:
                code, reason, message = client.refused(method)
                assert (code, reason) == ("PERMISSION_DENIED", "NOT_ALLOWED"), method
                assert f"the right to {needs[1]}" in message
    with pytest.raises(grpc.RpcError, match="this token: not known here"):
        world.as_("a token that nobody has").methods()


def _comments() -> dict[str, str]:
    """Of each method, what stands above it in proto/."""
    found = {}
    for path in (ROOT / "proto/kvstore/v1").glob("*.proto"):
        service, above = "", ""
        for line in path.read_text().splitlines():
            if match := re.match(r"service (\w+)", line):
                service = match[1]
            elif match := re.match(r"  rpc (\w+)", line):
                found[f"{service}/{match[1]}"] = above
            above = f"{above} {line.strip(' /')}" if line.startswith("  //") else ""
    return found


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ModelService/PreloadModel", {"model": "--to=file:///etc"}),
        ("ModelService/PreloadModel", {"model": "Name"}),
        ("ModelService/GetModel", {}),
        ("ModelService/RemoveModel", {"model": "tiny"}),
        ("ModelService/ListModels", {"local": True, "model": "tiny"}),
        ("ModelService/PublishModel", {"directory": "-x", "name": "tiny"}),
        ("ModelService/PublishModel", {"directory": "/etc", "name": "tiny"}),
        ("ModelService/PublishModel", {"directory": "models/../../etc", "name": "tiny"}),
        ("ModelService/CollectModels", {"grace": "-1s"}),
        ("RegionService/VerifyRegion", {"region": "--repair"}),
        ("RegionService/VerifyRegion", {"region": "na", "share": 0.5}),
        ("RegionService/GetRegions", {"region": "a\nb"}),
        ("RegionService/WarmRegion", {"warming": {"region": "na", "to": "TIER_BUCKET"}}),
        ("RegionService/WarmRegion", {"warming": {"region": "na", "tenants": ["-x"]}}),
        ("RegionService/EraseRegions", {}),
        ("RegionService/EraseRegions", {"namespaces": ["3fa2"]}),
        ("RegionService/EraseRegions", {"tenant": "t" * 1025}),
        ("RegionService/EraseRegions", {"namespaces": ["3f" * 16] * 65}),
        ("RegionService/PlanWarming", {"warming": {"region": "na", "models": ["m"] * 100_000}}),
        ("RegionService/WarmRegion", {"warming": {"region": "na", "weights": ["m"] * 65}}),
        ("RegionService/CancelErasure", {"tombstone": "../node"}),
        ("NodeService/ChangeSetting", {"key": "log.level", "value": "x" * 10_000}),
    ],
)
def test_bad_input_is_one_line(admin: Reflecting, method: str, request_: dict[str, Any]) -> None:
    """What makes no sense is refused in one line, and no process is begun for it."""
    before = admin.call("NodeService/ListOperations")
    code, reason, message = admin.refused(method, **request_)
    assert (code, reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")
    assert message and "\n" not in message
    assert admin.call("NodeService/ListOperations") == before


def test_an_operation_is_cancelled(world: World, admin: Reflecting) -> None:
    """Who may begin it may cancel it; a publisher may not cancel what only an admin begins. Either try is in the audit log, once."""
    publisher = world.as_("publisher")
    begun = admin.call("RegionService/VerifyRegion", region="na", deep=True)
    name = begun["operation"]["id"]
    assert publisher.call("NodeService/GetOperation", id=name)  # may see it
    code, reason, _ = publisher.refused("NodeService/CancelOperation", id=name)
    assert (code, reason) == ("PERMISSION_DENIED", "NOT_ALLOWED")
    admin.call("NodeService/CancelOperation", id=name)
    assert ended(admin, begun)["state"] == "STATE_CANCELLED"
    lines = [json.loads(line) for line in world.errors.read_text().splitlines() if name in line]
    told = [(one["who"], one["action"], one["outcome"]) for one in lines if one["logger"] == "kvstore.audit"]
    action = "NodeService/CancelOperation"
    assert told == [("publisher", action, "PERMISSION_DENIED"), ("admin", action, "OK")]


def test_what_is_put_together_is_no_tenants() -> None:
    """Rows of those beyond a limit belong to no tenant, whatever it is called; what a prefix may have saved for another one is
    not told."""
    row = {"model": "m", "lookups": 1, "tokens_asked": 64, "prefill_s_saved": 1.0}
    row |= {"tokens": {"hit_dram": 64}, "bytes": {}, "region": "", "hour_s": 0}
    prefix = {"model": "m", "tokens_saved": 100, "error_tokens": 30, "last_s": 1.0, "first_s": 1.0}
    tenants = ("acme", "rival", EVERYBODY_ELSE)
    answer = {
        "rows": [{**row, "tenant": tenant} for tenant in tenants],
        "prefixes": [{**prefix, "tenant": tenant} for tenant in tenants],
        "now_s": 2.0,
        "since_s": 0.0,
        "until_s": 2.0,
        "holdings": [],
        "region": "na",
        "gpu_hour_price": 3.0,
        "currency": "USD",
    }
    own = report.document(report.of_tenant(answer, "acme"))
    assert (own["totals"]["lookups"], own["totals"]["money_saved"]) == (1, None)
    assert [(one["tokens_saved"], one["error_tokens"]) for one in own["prefixes"]] == [(70, 0)]
    assert report.document(report.of_tenant(answer, EVERYBODY_ELSE))["totals"]["lookups"] == 0


def test_none_is_left_when_the_process_ends(world: World) -> None:
    """With the gRPC process what it has begun ends."""
    command = ["grpc", "--listen=127.0.0.1:0", f"--socket={world.place.socket}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", *command], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    target = process.stdout.readline().split()[1].removeprefix("grpc=")
    client, children = Reflecting(target), list[str]()
    try:
        of_main = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def under_way() -> list[str]:  # on a busy machine one may have ended before it is looked for
            client.call("RegionService/VerifyRegion", region="na", deep=True)
            return of_main.read_text().split()

        until(lambda: children.extend(under_way()) or children)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        process.stdout.close()
        client.close()
    until(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))
