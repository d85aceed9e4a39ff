"""`--node`: a command asks another node what it asks the daemon here, and prints the same."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvstore.tools.cli import COMMANDS, main, module_of, parser_of
from kvstore.v1 import cache_pb2, models_pb2, nodes_pb2, regions_pb2, reports_pb2, types_pb2
from tests.remote.servicer import Servicer, serving
from tests.remote.test_calls import failing
from tests.running import environment

HASH = bytes(range(32))
SETTING = {"key": "log.level", "value": "debug", "before": "info", "file": "f", "source_before": "file", "where_before": "f:1"}  # fmt: skip
PAIR = {"source": "us", "region": "eu", "state": "ok", "failures": [], "pending": 3}
VERIFIED = {"bucket": "b", "packs": 1, "bytes": 2, "announced_packs": 1, "models": 0, "announced_models": 0, "missing_models": 0, "whole": True, "repaired": 0, "counts": {}, "ok": True, "findings": []}  # fmt: skip
MODEL = {"bucket": "b", "model": "m", "revision": "r"}
PLAN = {"region": "eu", "order": {}, "plan": {"copy_packs": 1, "copy_bytes": 5}, "state": "planned", "daemons": [], "mirrors": []}  # fmt: skip
ERASED = {"tombstone": "t", "prefix": "", "regions": [{"region": "eu", "state": "ready"}]}


class Far(Servicer):
    """A node that answers what it was given, and remembers the last request."""

    def __init__(self) -> None:
        super().__init__()
        self.request: Any = None
        self.target = ""

    def gives(self, method: str, message: Any) -> None:
        self.answers.setdefault("NodeService/GetPrincipal", lambda request, context: b"")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.request = request
            return message

        def answers(request: Any, context: grpc.ServicerContext) -> Any:
            self.request = request
            yield message

        self.answers[method] = answers if "/Watch" in method else answer

    def works(self, method: str, message: Any, document: Any, **ended: Any) -> None:
        """The operation that this call begins ends so."""
        state = types_pb2.Operation(id="7", method=method, state=types_pb2.Operation.STATE_DONE)
        state.document_json = json.dumps(document) if document is not None else ""
        for name, value in ended.items():
            setattr(state, name, value)
        message.operation.CopyFrom(types_pb2.Operation(id="7", method=method))
        self.gives(method, message)
        begun = self.answers[method]
        self.gives("NodeService/WatchOperation", nodes_pb2.WatchOperationResponse(operation=state))
        self.answers[method] = begun


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVSTORE_CONFIG", "")
    servicer = Far()
    with serving(servicer) as port:
        servicer.target = f"127.0.0.1:{port}"
        yield servicer


Captured = pytest.CaptureFixture[str]
namespaces = ["ab" * 16]
ASKED: list[tuple[str, str, Any, Any, str]] = [
    ("retention", "CacheService/ListRules", cache_pb2.ListRulesResponse, {"pins": []}, ""),
    ("config get log", "NodeService/ListSettings", nodes_pb2.ListSettingsResponse, {"settings": []}, "name: log"),
    ("config set log.level debug", "NodeService/ChangeSetting", nodes_pb2.ChangeSettingResponse, SETTING, "key: log.level value: debug"),
    ("clear --all --yes", "CacheService/Erase", cache_pb2.EraseResponse, {"dry_run": False, "used_blocks": 0, "rows_left": 0}, "everything: True"),
    ("report --since 1h", "ReportService/GetReport", reports_pb2.GetReportResponse, {"by": {"tier": []}}, "since"),
    ("top", "ReportService/WatchFigures", reports_pb2.WatchFiguresResponse, {"now_s": 1}, "interval"),
    ("explain --tokens 1,2 --model m", "CacheService/Explain", cache_pb2.ExplainResponse, {"runs": []}, "model: m"),
    ("model ls", "ModelService/ListModels", models_pb2.ListModelsResponse, {"bucket": "b", "revisions": []}, ""),
    ("model ls --local", "ModelService/ListModels", models_pb2.ListModelsResponse, {"revisions": []}, "local: True"),
    ("model show m", "ModelService/GetModel", models_pb2.GetModelResponse, MODEL, "model: m"),
    ("region status", "RegionService/GetRegions", regions_pb2.GetRegionsResponse, {"deployment": "d", "mirrors": [PAIR]}, ""),
    ("region status eu --now", "RegionService/GetRegions", regions_pb2.GetRegionsResponse, {"deployment": "d", "mirrors": [PAIR]}, "region: eu live: True"),
    ("region ls", "RegionService/ListRegions", regions_pb2.ListRegionsResponse, {"deployment": "d", "regions": [{"region": "eu", "url": "u", "state": "ready"}]}, ""),
    ("report --by minute", "ReportService/GetReport", reports_pb2.GetReportResponse, {"by": {}}, "by_minute: True"),
    ("warm eu --dry-run", "RegionService/PlanWarming", regions_pb2.PlanWarmingResponse, PLAN, "region: eu"),
    ("region erase --tenant acme --dry-run", "RegionService/PlanErasure", regions_pb2.PlanErasureResponse, {**ERASED, "dry_run": True}, "tenant: acme"),
    ("region erase --ls --region eu", "RegionService/ListErasures", regions_pb2.ListErasuresResponse, {"tombstones": [], "regions": ERASED["regions"]}, "regions: eu"),
    (f"region erase --cancel {'ab' * 16}", "RegionService/CancelErasure", regions_pb2.CancelErasureResponse, ERASED, f"tombstone: {'ab' * 16}"),
    ("warm eu --cancel --to nvme", "RegionService/CancelWarming", regions_pb2.CancelWarmingResponse, {"order": {"id": "o"}}, "to: TIER_NVME"),
]  # fmt: skip


def said(message: Any) -> str:
    return " ".join(str(message).replace('"', "").replace("true", "True").split())


@pytest.mark.parametrize(
    ("words", "method", "kind", "document", "asked"), ASKED, ids=[row[0] for row in ASKED]
)
def test_what_is_read_is_what_the_node_says(
    far: Far, capsys: Captured, words: str, method: str, kind: Any, document: Any, asked: str
) -> None:
    """Each command asks its call, with what was given, and -o json prints the document that came."""
    far.gives(method, kind(document_json=json.dumps(document)))
    assert main([*words.split(), "--node", far.target, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert asked in said(far.request)
    assert set(far.calls) <= {method, "NodeService/GetPrincipal"}


@pytest.mark.parametrize(
    ("words", "method", "kind", "document"),
    [
        ("region ls", "ListRegions", regions_pb2.ListRegionsResponse, {"regions": [{"region": "eu", "url": "u", "state": "no answer"}]}),
        ("region erase --tenant a --dry-run", "PlanErasure", regions_pb2.PlanErasureResponse, {"tombstone": "t", "prefix": "", "regions": [{"region": "eu", "state": "no answer"}]}),
        ("region erase --ls", "ListErasures", regions_pb2.ListErasuresResponse, {"tombstones": [], "regions": [{"region": "eu", "state": "no answer"}]}),
        ("region erase --cancel 00000000000000000000000000000000", "CancelErasure", regions_pb2.CancelErasureResponse, {"tombstone": "t", "prefix": "", "regions": [{"region": "eu", "state": "no answer"}]}),
        ("region status", "GetRegions", regions_pb2.GetRegionsResponse, {"mirrors": [{**PAIR, "state": "no answer"}], "keepers": []}),
    ],
)  # fmt: skip
def test_a_bucket_that_is_away_there_has_the_exit_code_of_here(
    far: Far, words: str, method: str, kind: Any, document: Any
) -> None:
    """The document says whether a bucket does not answer (4), or something else is wrong (1); of a node that does not say it, it is 1."""
    for more, code in (({"away": ["eu"]}, 4), ({"away": []}, 1), ({}, 1)):
        far.gives(
            f"RegionService/{method}", kind(document_json=json.dumps({"deployment": "d", **document, **more}))
        )
        assert main([*words.split(), "--node", far.target]) == code


WORKS: list[tuple[str, str, Any, Any, str, str]] = [
    ("model publish /models/m --name m", "ModelService/PublishModel", models_pb2.PublishModelResponse,
     {**MODEL, "was_there": False, "files": 1, "bytes": 2, "put_chunks": 1, "chunks": 1, "put_bytes": 2, "took_s": 1.0, "with_cache": False, "left_out": 0}, "directory: /models/m name: m", "m@r is published"),
    ("model rm m@r", "ModelService/RemoveModel", models_pb2.RemoveModelResponse, {"bucket": "b", "removed": ["m@r"]}, "model: m@r", "removed m@r from b"),
    ("model gc --dry-run", "ModelService/CollectModels", models_pb2.CollectModelsResponse,
     {"bucket": "b", "dry_run": True, "grace_s": 1, "manifests": 1, "named": 1, "deleted": 0, "deleted_bytes": 0, "young": 0, "left": 0}, "dry_run: True", "would delete 0 chunks"),
    ("model verify --deep", "ModelService/VerifyModel", models_pb2.VerifyModelResponse,
     {"bucket": "b", "ok": True, "revisions": 1, "chunks": 1, "bytes": 1, "read_bytes": 1, "found": 0, "findings": []}, "deep: True", "sound"),
    ("model preload m", "ModelService/PreloadModel", models_pb2.PreloadModelResponse,
     {"model": "m", "revision": "r", "path": "/p", "bytes": 1, "by_source": {}, "kept_bytes": 0, "seconds": 0.1}, "model: m", "m@r: here already"),
    ("model load m", "ModelService/LoadModel", models_pb2.LoadModelResponse,
     {"model": "m", "revision": "r", "bytes": 1, "by_source": {"disk": 1024}, "seconds": 0.1}, "model: m", "m@r is in DRAM: 1 KiB"),
    ("region verify eu --deep --sample 1%", "RegionService/VerifyRegion", regions_pb2.VerifyRegionResponse, VERIFIED, "region: eu deep: True share: 0.01", "sound"),
    ("warm eu --model a* --budget 1MiB --for 1h --wait 0", "RegionService/WarmRegion", regions_pb2.WarmRegionResponse, {**PLAN, "state": "not taken"}, "models: a* budget_bytes: 1048576 in_force { seconds: 3600", "no daemon of the region"),
    ("region erase --yes --tenant acme --force --wait 5s", "RegionService/EraseRegions", regions_pb2.EraseRegionsResponse,
     {"tombstone": "t", "prefix": "", "watched_until_s": 1, "regions": [{"region": "eu", "state": "buried"}]}, "tenant: acme days: 30 wait { seconds: 5", "eu      buried"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "method", "kind", "document", "asked", "shown"), WORKS, ids=[row[0] for row in WORKS]
)
def test_work_is_done_there(
    far: Far, capsys: Captured, words: str, method: str, kind: Any, document: Any, asked: str, shown: str
) -> None:
    """What takes long is begun there and watched; its document is printed as that of this machine, its exit code is ours."""
    far.works(method, kind(), document)
    assert main([*words.split(), "--node", far.target, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    far.works(method, kind(), document, state=types_pb2.Operation.STATE_FAILED, exit_code=3)
    assert main([*words.split(), "--node", far.target]) == 3
    captured = capsys.readouterr()
    assert shown in captured.out and not captured.err
    far.works(
        method, kind(), None, state=types_pb2.Operation.STATE_FAILED, problem="disk\x1b full", exit_code=1
    )
    assert main([*words.split(), "--node", far.target]) == 1
    captured = capsys.readouterr()
    assert "disk" in captured.err and "\x1b" not in captured.err and captured.err.count("\n") == 1
    far.gives(method, kind(operation=types_pb2.Operation(id="7")))
    far.answers["NodeService/WatchOperation"] = failing(grpc.StatusCode.NOT_FOUND)
    assert main([*words.split(), "--node", far.target]) == 3
    assert asked in said(far.request)


def test_rules_are_made_there(far: Far, capsys: Captured) -> None:
    """Pins, TTLs and quotas: what is given becomes the fields of the call; a beginning of a hash is looked up there."""
    far.gives("CacheService/FindPrefixes", cache_pb2.FindPrefixesResponse(hashes=[HASH]))
    for words, method, kind, asked in (
        ("pin 0001", "CacheService/Pin", cache_pb2.PinResponse, "hash:"),
        (f"unpin {HASH.hex()} --namespace 3fa2", "CacheService/Unpin", cache_pb2.UnpinResponse, "digest: 3fa2"),
        ("ttl 1min 0001", "CacheService/SetTtl", cache_pb2.SetTtlResponse, "ttl_s: 60"),
        ("ttl never --namespace 3fa2", "CacheService/SetTtl", cache_pb2.SetTtlResponse, "ttl_s: 0"),
        ("quota --namespace 3fa2 --dram none", "CacheService/SetQuota", cache_pb2.SetQuotaResponse, "dram_bytes: -1"),
    ):  # fmt: skip
        far.gives(method, kind(namespaces=namespaces))
        assert main([*words.split(), "--node", far.target, "-o", "json"]) == 0, words
        assert json.loads(capsys.readouterr().out)["namespaces"] == namespaces
        assert asked in said(far.request), words
    assert far.calls.count("CacheService/FindPrefixes") == 2
    assert main(["ttl", "off", "--namespace", "3fa2", "--node", far.target]) == 0
    assert not far.request.HasField("ttl_s")
    for verb, kind in (("pin", models_pb2.PinModelResponse), ("unload", models_pb2.UnloadModelResponse)):
        far.gives(f"ModelService/{verb.capitalize()}Model", kind())
        assert main(["model", verb, "m", "--node", far.target]) == 0
        assert far.request.model == "m"
    assert "m is pinned\nm is not in DRAM any more\n" in capsys.readouterr().out
    far.gives("NodeService/CheckNode", nodes_pb2.CheckNodeResponse(problems=["row 7"]))
    assert main(["fsck", "--node", far.target]) == 1
    assert capsys.readouterr().out == "row 7\n1 problem\n"


@pytest.mark.parametrize("words", ["pin", "unpin", "ttl 1min", "clear --yes --prefix", "explain --prefix"])
def test_an_odd_number_of_digits_is_no_whole_hash(far: Far, capsys: Captured, words: str) -> None:
    """Longer than a hash of vLLM, it may be the beginning of another one: the node is asked, and knows none. One line, exit code 3."""
    far.gives("CacheService/FindPrefixes", cache_pb2.FindPrefixesResponse())
    far.gives(
        "CacheService/ListNamespaces", cache_pb2.ListNamespacesResponse(namespaces=[{"digest": 16 * b"n"}])
    )
    assert main([*words.split(), 65 * "a", "--node", far.target]) == 3
    captured = capsys.readouterr()
    assert captured.err.endswith(f"{65 * 'a'}: no known prefix begins so\n") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("UNAUTHENTICATED", 1), ("PERMISSION_DENIED", 1), ("NOT_FOUND", 3), ("INVALID_ARGUMENT", 2), ("DEADLINE_EXCEEDED", 4), ("INTERNAL", 1)],
)  # fmt: skip
def test_refusals_have_the_exit_codes_of_this_machine(
    far: Far, capsys: Captured, code: str, exit_code: int
) -> None:
    """One line on stderr, and the documented exit code."""
    far.answers["CacheService/ListRules"] = failing(grpc.StatusCode[code])
    assert main(["retention", "--node", far.target]) == exit_code
    captured = capsys.readouterr()
    assert captured.err.startswith("kvstore: retention: ") and captured.err.count("\n") == 1
    assert not captured.out


def test_wrong_words_are_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is about this machine does not go with --node, its files need it, and commands that have none do not know it."""
    monkeypatch.setenv("KVSTORE_CONFIG", "")
    node = ["--node", "127.0.0.1:1"]
    for words, said in (
        (["status", *node, "--socket", "/s"], "--socket does not go with --node"),
        (["fsck", *node, "--repair"], "--repair does not go with --node"),
        (
            ["model", "publish", "/m", "--name", "m", *node, "--by", "me"],
            "model publish: --by does not go with --node",
        ),
        (["model", "ls", *node, "--region", "eu"], "--region does not go with --node"),
        (
            ["region", "erase", "--yes", *node, "--tenant", "a", "--regions", "f"],
            "--regions does not go with --node",
        ),
        (["prefetch", *node, "abcd"], "unrecognized arguments: --node"),
        (["warm", "eu", *node, "--budget", "lots"], "--budget lots"),
        (["explain", *node, "--engines"], "--engines does not go with --node"),
        (["region", "init", "eu", *node], "region init: unrecognized arguments: --node"),
        (["status", "--node-ca", "ca"], "--node-ca needs --node HOST:PORT"),
        (["status", "--node", "here"], "here: allowed is HOST:PORT"),
        (["serve", *node], "unrecognized arguments: --node"),
        (["model", "path", "m", *node], "unrecognized arguments: --node"),
    ):
        assert main(words) == 2, words
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1, captured.err
    assert main(["status", *node, "--node-ca", "/none"]) == 3
    assert "/none: no such file" in capsys.readouterr().err


def test_files_come_from_the_environment(
    far: Far, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """KVSTORE_NODE_TOKEN_FILE and its like stand in for their options, and are no settings of the daemon."""
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("KVSTORE_NODE_TOKEN_FILE", str(tmp_path / "token"))
    far.gives("CacheService/ListRules", cache_pb2.ListRulesResponse(document_json="{}"))
    assert main(["retention", "--node", far.target, "-o", "json"]) == 0
    assert far.tokens == ["Bearer secret"]
    assert main(["config", "check"]) == 0


def test_which_commands_have_it() -> None:
    """--node is where another node can do it, and nowhere else."""
    here = {"serve", "web", "grpc", "mirror", "arena", "disks", "doctor", "clients", "slow", "prefetch", "record", "replay", "bench", "completion", "version", "help"}  # fmt: skip
    has = {
        command
        for command in COMMANDS
        if any("--node" in action.option_strings for action in parser_of(command)._actions)
    }
    of_verbs = {
        "model": {"ls", "show", "verify", "publish", "preload", "rm", "gc", "pin", "unpin", "evict", "load", "unload"},
        "region": {"ls", "status", "verify", "erase"},
        "config": {"get", "set"},
    }  # fmt: skip
    assert has == set(COMMANDS) - here - of_verbs.keys()
    assert {command: set(module_of(command).VERBS.of_nodes) for command in of_verbs} == of_verbs


def test_control_c_cancels(far: Far) -> None:
    """On a terminal the progress is shown; Control-C has the node stop the work, and says so."""
    far.works("ModelService/PreloadModel", models_pb2.PreloadModelResponse(), None)

    def watch(request: Any, context: grpc.ServicerContext) -> Any:
        running = types_pb2.Operation(id="7", state=types_pb2.Operation.STATE_RUNNING, progress="7 of 9")
        yield nodes_pb2.WatchOperationResponse(operation=running)
        while context.is_active():
            time.sleep(0.05)

    far.answers["NodeService/WatchOperation"] = watch
    far.gives("NodeService/CancelOperation", nodes_pb2.CancelOperationResponse())
    ours, theirs = pty.openpty()
    words = ["model", "preload", "m", "--node", far.target]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", *words], stderr=theirs, env=environment(TERM="xterm", COLUMNS="80")
    )
    os.close(theirs)
    shown = b""
    while b"7 of 9" not in shown:
        shown += os.read(ours, 1024)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    while b"stays" not in shown:
        shown += os.read(ours, 1024)
    os.close(ours)
    assert b"kvstore: model preload: cancelled; what is done stays" in shown
    assert far.calls[-1] == "NodeService/CancelOperation"


def test_without_node_nothing_of_grpc_is_loaded() -> None:
    """Commands stay as fast as they were, and where the extra is missing --node says in one line what to install."""
    code = "import sys; from kvstore.tools.cli import main; {0}; code = main({1}); print(code, 'grpc' in sys.modules)"
    runs = [
        ("pass", ["status", "--socket", "/none"], "4 False"),
        ("sys.modules['grpc'] = None", ["status", "--node", "127.0.0.1:1"], "1 True"),
    ]
    for before, words, said in runs:
        run = subprocess.run(
            [sys.executable, "-c", code.format(before, words)],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        assert run.stdout.strip() == said and run.stderr.count("\n") == 1, run.stderr
    assert "pip install 'kvstore-llm[grpc]'" in run.stderr
