"""pytest's side of running vLLM's own tests: ours in the place of theirs, the table kept, and everything written down.

A test that is run fails also where ours was not called, where ours had a bug that its guard kept from the engine, and where
ours declined the model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from connectors.transfer import link
from connectors.vllm.guard import Guard
from kvstore.client import ClientError
from tests.vllm.theirs import player
from tests.vllm.theirs.table import Entry, Table

# Ours is what vLLM makes for these names.
REPLACED = (
    "ExampleConnector",
    "KVStoreConnector",
    "MockKVConnector",
    "NixlConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)
# Called in every engine's life, whatever is tested.
NO_EVIDENCE = {"bind_gpu_block_pool", "get_kv_connector_stats", "shutdown", "take_events"}


class Theirs:
    """tree: vLLM's source. out: where the results go."""

    def __init__(self, tree: Path, table: Table, out: Path) -> None:
        self._tests, self._table, self._out = tree / "tests", table, out
        self.results: dict[str, Result] = {}
        self._faults: list[str] = []

    # ---- ours in the place of theirs ----

    def pytest_sessionstart(self) -> None:
        from tests.v1.kv_connector.unit import utils  # type: ignore[import-untyped]  # theirs

        for name in REPLACED:
            KVConnectorFactory._registry[name] = _class_of_ours
        utils.create_mock_connector = Mock  # what it says of cache hits is for ours to say
        utils.ExampleConnector = player.Player  # inside of TestExampleConnector, which records
        _keep_ours(Scheduler, "connector", lambda scheduler: scheduler.connector)
        _keep_ours(ActiveKVConnector, "kv_connector", lambda _: _worker_of_ours(utils))
        _add_ours()
        link.open_client = _open_client
        note = Guard.note

        def noted(self: Guard, where: str, error: BaseException) -> None:
            if not isinstance(error, ClientError):
                player.stage.bugs.append(f"{where}: {type(error).__name__}: {error}")
            note(self, where, error)

        Guard.note = noted  # type: ignore[method-assign]
        say_once = Guard.say_once

        def said(self: Guard, text: str) -> None:
            if "is not stored" in text:
                player.stage.declined.append(text)
            say_once(self, text)

        Guard.say_once = said  # type: ignore[method-assign]

    # ---- the table ----

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        out_of_reach: list[pytest.Item] = []
        seen: set[tuple[str, str]] = set()
        for item in items:
            path, case = self._name(item)
            entry = self._table.entry(path, case)
            if entry is None:
                self._faults.append(
                    f"{path}: {case} is not in the table: run it, or leave it out with a reason"
                )
                continue
            seen.add((entry.path, entry.test))
            (kept if entry.tried else out_of_reach).append(item)
        for path, test in self._table.entries.keys() - seen:
            self._faults.append(f"{path}: {test} is in the table, and vLLM has no such test")
        for path in self._table.undecided(self._tests):
            self._faults.append(f"{path} is not in the table, and is about connectors")
        config.hook.pytest_deselected(items=out_of_reach)
        items[:] = kept

    def _name(self, item: pytest.Item) -> tuple[str, str]:
        path = item.path.relative_to(self._tests).as_posix()
        return path, item.nodeid.split("::", 1)[1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._faults.append(f"{report.nodeid} was not collected: {report.longreprtext.splitlines()[-1]}")

    # ---- a test ----

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        stage = player.new_stage()
        path, case = self._name(item)
        entry = self._table.entry(path, case)
        assert entry is not None
        self.results[f"{path}::{case}"] = item.stash[RESULT] = Result(entry, stage)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        result = item.stash[RESULT]
        if not report.passed and not result.why:
            result.outcome, result.why = report.outcome, str(report.longreprtext or report.longrepr)[-2000:]
        if report.when == "teardown":
            result.end()
        if result.entry.why and (report.failed or report.when == "call"):
            report.outcome, report.wasxfail = "skipped", result.entry.why
        if report.when == "teardown" and result.outcome != "failed" and (fault := result.fault()):
            report.outcome, report.longrepr = "failed", fault
            report.__dict__.pop("wasxfail", None)
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for fault in self._faults:
            terminalreporter.write_line(f"FAULT {fault}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._faults:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        wrong = {name: fault for name, result in self.results.items() if (fault := result.fault())}
        passed = [name for name, result in self.results.items() if result.outcome == "passed"]
        out = {
            "faults": self._faults,
            "wrong": wrong,
            "passed": passed,
            "tried": len(self.results) - len(passed),
        }
        self._out.write_text(json.dumps(out), encoding="utf-8")


@dataclass
class Result:
    """What became of one test. outcome: pytest's, or "objected" where it passed and says nothing of ours, or something bad."""

    entry: Entry
    stage: player.Stage
    outcome: str = "passed"
    why: str = ""

    def end(self) -> None:
        """The test is over, and so are the connectors made in it."""
        self.stage.close()
        if self.outcome == "passed" and (why := _objection(self.stage, self.entry.asked)):
            self.outcome, self.why = "objected", why

    def fault(self) -> str:
        """What is wrong with the test, or with what the table says of it; empty if nothing is."""
        if not self.entry.why:
            return "" if self.outcome == "passed" else f"{self.outcome}: {self.why}"
        return f"passes with ours, and is left out: {self.entry.why}" if self.outcome == "passed" else ""


RESULT = pytest.StashKey[Result]()


def _keep_ours(owner: type, attribute: str, ours: Callable[[Any], Any]) -> None:
    """Where a test puts a mock in the place of its connector, ours plays it."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == attribute and isinstance(value, Mock):
            mock, value = value, ours(self)
            value.become_mock(mock)
        object.__setattr__(self, name, value)

    owner.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]


def _worker_of_ours(utils: Any) -> player.Player:
    kv = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
    return player.Player(utils.create_vllm_config(), KVConnectorRole.WORKER, kv)


def _add_ours() -> None:
    """A scheduler without a connector gets ours, beside whatever the test is about."""
    init = Scheduler.__init__

    def with_ours(self: Scheduler, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if vllm_config.kv_transfer_config is None:
            vllm_config = copy.copy(vllm_config)
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector="KVStoreConnector", kv_role="kv_both"
            )
        init(self, vllm_config, *args, **kwargs)

    Scheduler.__init__ = with_ours


def _open_client(*args: Any, **kwargs: Any) -> Any:
    """The store of the test that runs."""
    return player.stage.store.open(*args, **kwargs)


def _class_of_ours() -> type[player.Player]:
    player.stage.class_calls += 1
    return player.Player


def _objection(stage: player.Stage, asked: bool) -> str:
    """Why a test that passed says nothing about ours, or something bad."""
    if stage.bugs:
        return f"ours failed, and its guard kept that from vLLM: {'; '.join(stage.bugs)}"
    if stage.declined:
        return f"ours declined: {'; '.join(stage.declined)}"
    if asked:
        return "" if stage.class_calls else "vLLM did not ask for ours"
    return "" if stage.calls.keys() - NO_EVIDENCE else "no hook of ours was called"
