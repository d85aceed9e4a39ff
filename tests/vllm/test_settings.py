"""What an operator may set, how the connector is found, and what it counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from connectors.transfer.settings import SettingError, Settings, read_settings
from connectors.vllm.guard import Guard, guarded
from connectors.vllm.stats import GAUGES, MEANINGS, KVStorePromMetrics, KVStoreStats, Tally
from connectors.vllm_plugin import register
from kvstore.errors import Refused, Unavailable
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import World

pytestmark = pytest.mark.vllm


def test_defaults_are_allowed() -> None:
    """No key has to be set."""
    assert read_settings({}) == Settings()


def test_every_call_of_a_save_has_its_timeout(worlds: Callable[..., World], store: FakeStore) -> None:
    """The scheduler's and the ranks'."""
    worlds(extra={"save_timeout_s": 7})
    timeouts_s = {label: store.timeouts_s[label] for label in ("vllm saves", "vllm worker 0.0")}
    assert set(timeouts_s.values()) == {7.0}, timeouts_s


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lode", "async", "did you mean load"),
        ("load", "later", "'async' or 'sync'"),
        ("load", None, "'async' or 'sync'"),
        ("lookup_timeout_s", 0, "a number from"),
        ("lookup_timeout_s", True, "a number from"),
        ("lookup_timeout_s", 50, "at most load_timeout_s"),
        ("save_queue_bytes", 5, "a number from"),
        ("still_writing_wait_s", -1, "a number from 0 to 60"),
        ("load_threads", 100, "a number from 1 to"),
        ("kvstore_socket", "kvstore.sock", "an absolute path"),
        ("cache_dir", "cache", "an absolute path"),
        ("tenant", 7, "a string"),
    ],
)
def test_a_wrong_setting_is_named(key: str, value: Any, said: str) -> None:
    """The error names the key, the value, and what is allowed."""
    with pytest.raises(SettingError, match=said) as caught:
        read_settings({key: value})
    assert key in str(caught.value) and repr(value) in str(caught.value)


def test_registering_twice_is_allowed() -> None:
    """vLLM may run its plugins twice in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVStoreConnector").__name__ == "KVStoreConnector"


def test_the_package_announces_the_plugin() -> None:
    """The entry point that vLLM looks for names the function that registers the connector."""
    import tomllib

    from tests.running import ROOT

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["kvstore"].partition(":")
    assert (module, name) == (register.__module__, register.__name__)


def test_the_plugin_imports_light() -> None:
    """Every vLLM process runs the plugin: it brings in neither the engine's parts nor ours."""
    code = "import connectors.vllm_plugin, sys; print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch', 'kvstore')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_connector_brings_in_no_daemon() -> None:
    """In the engine's process there is the client and nothing of the daemon."""
    code = (
        "import connectors.vllm, sys; heavy = ('grpc', 'pydantic_settings', 'uvloop');"
        "print([m for m in sys.modules if m in heavy and m != 'grpc' or m in ('kvstore.engine', 'kvstore.daemon', 'tiers.dram.arena', 'tiers.nvme.device')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] in ("[]", "['uvloop']")


class Hooks:
    def __init__(self) -> None:
        self.counted: list[str] = []
        self.guard = Guard(self.counted.append)

    @guarded(lambda self, error: "otherwise")
    def hook(self, error: Exception | None) -> str:
        if error is not None:
            raise error
        return "true"


def test_a_guarded_hook_never_raises() -> None:
    """Failures are counted by kind and answered with the harmless value."""
    hooks = Hooks()
    assert hooks.hook(None) == "true"
    assert {hooks.hook(ValueError()), hooks.hook(Unavailable("gone")), hooks.hook(Refused("a", "b"))} == {
        "otherwise"
    }
    assert hooks.counted == ["hook_errors", "unavailable", "refused"]


def test_each_kind_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is away for an hour costs one line, not one for every step."""
    from connectors.vllm import guard

    lines: list[str] = []
    log = SimpleNamespace(
        error=lambda text, *_, **__: lines.append(text), warning=lambda text, *_, **__: lines.append(text)
    )
    monkeypatch.setattr(guard, "logger", log)
    hooks = Hooks()
    for _ in range(5):
        hooks.hook(Unavailable("gone"))
        hooks.hook(ValueError())
    assert len(lines) == 2 and len(hooks.counted) == 10


def test_a_daemon_that_is_back_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each outage costs two lines: its beginning and its end, with how many calls failed. Bugs of ours are not said again."""
    from connectors.vllm import guard

    lines: list[str] = []

    def say(text: str, *facts: object, **_: object) -> None:
        lines.append(text % facts)

    monkeypatch.setattr(guard, "logger", SimpleNamespace(error=say, warning=say, info=say))
    hooks = Hooks()
    hooks.guard.look(True)
    for _ in range(2):
        for _ in range(3):
            hooks.hook(Unavailable("gone"))
            hooks.hook(ValueError())
            hooks.guard.look(False)
        hooks.guard.look(True)
        hooks.guard.look(True)
    first, bug, back, again, back_again = lines
    assert first == again == "kvstore: hook: gone" and "hook failed" in bug
    assert "answers again, after 3 failed calls" in back and "after 3 failed calls" in back_again


def test_gauges_are_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gauge is told when it changes and with all that is told, and is not added up."""
    tally = Tally()
    tally.set("connected", 1)
    one = tally.take()
    assert one is not None and one.data == {"connected": 1} and not one.is_empty()
    tally.set("connected", 1)
    assert tally.take() is None
    tally.set("connected", 0)
    tally.add("lookups", 2)
    two = tally.take()
    assert two is not None
    both = one.aggregate(two).aggregate(KVStoreStats(data={"lookups": 1}))
    assert both.data == {"connected": 0, "lookups": 3} and both.reduce()["connected"] == 0


def test_stats_add_up() -> None:
    """Sums of ranks and steps are sums of their numbers, and a taken tally starts again."""
    tally = Tally()
    tally.add("saved_blocks", 3)
    tally.add("save_seconds", 0.5)
    tally.add("saved_bytes", 2_000_000)
    one = tally.take()
    assert one is not None and tally.take() is None
    both = one.aggregate(KVStoreStats(data={"saved_blocks": 4, "skipped_queue_full": 1}))
    assert both.data["saved_blocks"] == 7
    assert both.reduce()["save MB/s"] == 4.0 and both.reduce()["skipped queue full"] == 1
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_every_count_has_a_meaning_and_a_counter() -> None:
    """What is counted anywhere in the connector is in the table, and so in Prometheus."""
    import re
    from pathlib import Path

    import connectors

    source = "".join(path.read_text() for path in Path(connectors.__path__[0]).rglob("*.py"))
    counted = set(re.findall(r'_(?:tally\.add|count)\(\s*(?:tracked, )?"(\w+)"', source))
    assert counted <= set(MEANINGS) and len(counted) > 10
    assert set(re.findall(r'_tally\.set\(\s*"(\w+)"', source)) == set(GAUGES)
    seen: dict[str, float] = {}

    class Counter:
        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            self.name = name

        def labels(self, *values: object) -> Counter:
            return self

        def inc(self, amount: float) -> None:
            seen[self.name] = seen.get(self.name, 0) + amount

        def set(self, amount: float) -> None:
            seen[self.name] = amount

    from prometheus_client import Counter as PromCounter
    from prometheus_client import Gauge, Histogram

    types = {Gauge: Counter, PromCounter: Counter, Histogram: Counter}
    metrics = KVStorePromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    metrics.observe({"saved_blocks": 3, "connected": 1, "no such thing": 1})
    metrics.observe({"saved_blocks": 2, "connected": 0})
    assert seen == {"vllm:kvstore_saved_blocks": 5, "vllm:kvstore_connected": 0}
