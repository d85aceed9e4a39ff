"""vLLM of a release that the connector is not made for: the engine starts without a store, and one line says why."""

from __future__ import annotations

import importlib.util
import logging
import tomllib
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from connectors.vllm.declining import VLLM_FIRST, VLLM_LAST, unsupported
from tests.running import ROOT, Daemon
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost

pytestmark = pytest.mark.vllm

OURS = [
    "0.32.0",
    "0.33.0+cpu",
    "0.32.1.dev3+g1a2b3c.cpu",
    "0.33.0rc2",
    "0.33.1.dev190+gabcdef",
    "v0.33.0",
    "0.33",
]
OTHERS = [
    "0.31.0",
    "0.31.2+cpu",
    "0.34.0",
    "0.34.0.dev1",
    "1.0.0",
    "1.32.0",
    "0.320.0",
    "0.3",
    "0.1.dev1+g5c8b2a7",
]
UNREADABLE = ["dev", "", "0", "main", "1!0.33.0", "x0.33.0", None, (0, 33)]


def imported() -> Any:
    """The connector's module, as a process imports it that has not done so before."""
    spec = importlib.util.find_spec("connectors.vllm")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", OURS)
def test_releases_that_it_is_made_for(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Builds, candidates and what was built between releases count as the release that they name."""
    monkeypatch.setattr(vllm, "__version__", version)
    assert unsupported(version) == ""
    assert imported().KVStoreConnector.__module__ == "connectors.vllm.connector"
    assert not caplog.messages


@pytest.mark.parametrize("version", OTHERS + UNREADABLE, ids=str)
def test_other_releases_are_declined_in_one_line(
    version: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the version, and the range."""
    caplog.set_level(logging.WARNING, logger="vllm.kvstore")
    monkeypatch.setattr(vllm, "__version__", version)
    assert imported().KVStoreConnector.__module__ == "connectors.vllm.declining"
    (line,) = caplog.messages
    assert "(0.32 to 0.33): nothing is stored or loaded" in line and "\n" not in line
    assert (str(version) if version else "without a version") in line


def test_a_release_that_lacks_something_is_declined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build whose version is fine, and that has not what the connector imports: what 0.31 lacks, for one."""
    import sys

    monkeypatch.delitem(sys.modules, "connectors.vllm.connector")
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    assert imported().KVStoreConnector.__module__ == "connectors.vllm.declining"
    (line,) = caplog.messages
    assert "cache_hit_source" in line and line.endswith("nothing is stored or loaded")


def test_a_release_without_the_factory_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM runs the plugin in every process, whoever's: it raises nothing."""
    import sys

    from connectors.vllm_plugin import register

    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    register()
    (line,) = caplog.messages
    assert line.startswith("kvstore: the connector is not known to this vLLM by its name")


@pytest.mark.slow
def test_a_real_engine_that_is_declined(host: EngineHost, daemon: Daemon) -> None:
    """It answers as without a connector, before and after a reset, and stores nothing."""
    text = [prompt(80, 300), prompt(81, 100)]
    host.start(None)
    said = host.generate(text).tokens
    host.start(daemon.socket, module="connectors.vllm.declining", enable_prefix_caching=False)
    for _ in range(2):
        got = host.generate(text)
        assert (got.tokens, got.cached) == (said, [0, 0])
        host.core("reset_prefix_cache", reset_running_requests=True, reset_connector=True)
    assert not host.pending()
    host.start(daemon.socket)
    assert host.generate(text).cached == [0, 0]


def test_the_range_is_that_of_the_package() -> None:
    """What pip installs beside us, what the connector accepts, and what the documentation says is one range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, beyond = f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]}", f"{VLLM_LAST[0]}.{VLLM_LAST[1] + 1}"
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={first},<{beyond}"]
    assert f"vLLM {first} and {VLLM_LAST[0]}.{VLLM_LAST[1]}" in (ROOT / "docs/vllm.md").read_text()
