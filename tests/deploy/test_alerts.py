"""The alerts for Prometheus: each fires when it should, stays silent when not, and has its page in docs/alerts.md.

promtool evaluates the very rules over made-up series.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.constants import MEMORIES
from kvstore.tools.web.names import METRICS
from tests.running import ROOT, TIMEOUT_S

RULES = ROOT / "deploy/prometheus/kvstore-alerts.yml"
NODE = {"job": "kvstore", "instance": "n"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@dataclass(frozen=True)
class Case:
    """fires: labels that the alert then has besides those of the node and its severity; None: it is silent."""

    alert: str
    at: str
    fires: dict[str, str] | None
    series: dict[str, str] = field(default_factory=dict)  # without the labels of the node


def _hits(later: int, scale: int = 1) -> dict[str, str]:
    """Every five minutes: a day of half hits, then two hours with so many of 30,000."""
    before, after = 30_000 // scale, later // scale
    return {
        "kvstore_tokens_total{kind='hit'}": f"0+{before}x288 {288 * before + after}+{after}x23",
        "kvstore_tokens_total{kind='miss'}": f"0+{before}x312",
        "kvstore_tokens_total{kind='engine'}": f"0+{9 * before}x312",
    }


def _queue(name: str, length: int) -> dict[str, str]:
    return {
        f"kvstore_queue_{what}{{queue='{name}'}}": f"{n}x10"
        for what, n in (("length", length), ("limit", 100))
    }


def _loop(le: str) -> dict[str, str]:
    """Every turn is late by what this bucket has."""
    bounds = ("0.001024", "0.032768", "0.065536", "0.131072", "+Inf")
    counts = {bound: 600 if bounds.index(bound) >= bounds.index(le) else 0 for bound in bounds}
    return {f"kvstore_loop_delay_seconds_bucket{{le='{bound}'}}": f"0+{n}x30" for bound, n in counts.items()}


_BREAKER = "kvstore_breaker_open{breaker='nvme0 loads'}"
_CREDENTIALS = "kvstore_problem{kind='credentials',subject='na',level='problem'}"
_ENDS = "kvstore_problem{kind='certificate',subject='/tls.crt',level='warning'}"
_EMPTY, _FULL, _WELL = (
    f"kvstore_disk_state{{level='nvme0', directory='/mnt/a/kv', state='{state}'}}"
    for state in ("empty", "full", "ok")
)
_REFUSED = "kvstore_refused_total{reason='wrong_peer'}"
_OLD = {"kvstore_up": "1x40", "kvstore_uptime_seconds": "90000+60x40"}
_DRAM_WELL = {"kvstore_corrupt_dram_total": "0x70"}


_UNKEPT = "kvstore_problem{kind='keeper',subject='na',level='warning'}"


def _not_joined(region: str) -> str:
    return f"kvstore_problem{{kind='not_joined',subject='{region}',level='problem'}}"


CASES = [
    Case("KVStoreDown", "5m", {}, {"kvstore_up": "1 1 0x5"}),
    Case("KVStoreDown", "5m", None, {"kvstore_up": "1 0 1 0 1 0"}),
    Case("KVStoreNotScraped", "6m", {}, {"up": "0x10"}),
    Case("KVStoreNotScraped", "6m", None, {"up": "0 0 0 1 0 0 0 0"}),
    Case("KVStoreRestarting", "7m", {}, {"kvstore_uptime_seconds": "900 10 70 10 70 10 70 130"}),
    Case("KVStoreRestarting", "7m", None, {"kvstore_uptime_seconds": "900 10 70 130 190 10 70 130"}),
    Case("KVStoreUnhealthy", "3m", {}, {"kvstore_healthy": "1 0x5"}),
    Case("KVStoreUnhealthy", "3m", None, {"kvstore_healthy": "1x5"}),
    Case("KVStoreDiskNotUsed", "3m", {"level": "nvme0", "directory": "/mnt/a/kv", "state": "empty"}, {_EMPTY: "_ 1x5"}),
    Case("KVStoreDiskNotUsed", "3m", None, {_WELL: "1x5", _FULL: "_x2 1x5"}),
    Case("KVStoreDiskTooSmall", "13m", {"level": "nvme0", "directory": "/mnt/a/kv", "state": "full"}, {_FULL: "_ 1x15"}),
    Case("KVStoreDiskTooSmall", "13m", None, {_WELL: "1x15", _EMPTY: "_x2 1x15"}),
    Case("KVStoreBreakerOpen", "7m", {"breaker": "nvme0 loads"}, {_BREAKER: "0 1 0.5 1 1 0.5 1 1"}),
    Case("KVStoreBreakerOpen", "7m", None, {_BREAKER: "0 1 1 1 0 1 1 1"}),
    Case("KVStoreCorrupt", "4m", {}, {"kvstore_corrupt_nvme_total": "0 0 3 3 3", **_DRAM_WELL}),
    *(Case("KVStoreCorrupt", "4m", {}, {f"kvstore_corrupt_{level}_total": "0 0 3 3 3"}) for level in ("dram", "shared")),
    Case("KVStoreCorrupt", "69m", None, {"kvstore_corrupt_nvme_total": "0 3 3x70", **_DRAM_WELL}),
    Case("KVStoreHitRateFell", "1555m", {}, _hits(3000)),
    Case("KVStoreHitRateFell", "1555m", None, _hits(22_500)),
    Case("KVStoreHitRateFell", "1555m", None, _hits(3000, scale=100)),  # hardly anybody asks
    Case("KVStoreLoopSlow", "20m", {}, _loop("0.131072")),
    Case("KVStoreLoopSlow", "20m", None, _loop("0.032768")),
    Case("KVStoreQueueFull", "8m", {"queue": "loads"}, _queue("loads", 95)),
    Case("KVStoreQueueFull", "8m", None, _queue("loads", 80)),
    *(Case("KVStoreQueueFull", "8m", None, _queue(name, 100)) for name in MEMORIES),
    Case("KVStoreRefusing", "22m", {"reason": "wrong_peer"}, {_REFUSED: "_x20 1x5", **_OLD}),
    Case("KVStoreRefusing", "22m", {"reason": "wrong_peer"}, {_REFUSED: "3x18 4x9", **_OLD}),
    Case("KVStoreRefusing", "2m", {"reason": "wrong_peer"}, {_REFUSED: "1x5", "kvstore_up": "1x5", "kvstore_uptime_seconds": "9+60x5"}),
    Case("KVStoreRefusing", "30m", None, {_REFUSED: "5x40", **_OLD}),
    Case("KVStoreRefusing", "2m", None, {_REFUSED: "5x40", **_OLD}),  # it is Prometheus that is new
    Case("KVStoreRefusing", "22m", None, {"kvstore_refused_total{reason='not_found'}": "_x20 1x5", **_OLD}),
    Case("KVStoreWriteBudgetSpent", "35m", {}, {"kvstore_write_budget_spent_bytes": "96x40", "kvstore_write_budget_bytes": "100x40"}),
    Case("KVStoreWriteBudgetSpent", "35m", None, {"kvstore_write_budget_spent_bytes": "90x40", "kvstore_write_budget_bytes": "100x40"}),
    *(Case("KVStoreRegionAway", "12m", {"kind": "not_joined", "subject": name, "level": "problem"}, {_not_joined(name): "_ 1x15", **more})
      for name, more in (("na", {"kvstore_region_open": "0x15"}), ("na", {"kvstore_region_open": "1x15"}), ("eu", {}))),
    Case("KVStoreRegionAway", "12m", None, {_not_joined("na"): "1x8 stale", "kvstore_region_open": "0x8 1x9"}),
    Case("KVStoreProblem", "12m", None, {_not_joined("na"): "_ 1x15"}),
    Case("KVStoreRegionUnkept", "12m", {"kind": "keeper", "subject": "na", "level": "warning"}, {_UNKEPT: "_ 1x15"}),
    Case("KVStoreRegionUnkept", "12m", None, {_UNKEPT: "_ 1x8 stale"}),
    Case("KVStoreFeedOld", "9m", {}, {"kvstore_region_feed_age_seconds": "400+60x10"}),
    Case("KVStoreFeedOld", "9m", None, {"kvstore_region_feed_age_seconds": "5x10"}),
    Case("KVStorePersistGivenUp", "5m", {}, {"kvstore_persist_given_up_total": "0 0 2 2 2 2"}),
    Case("KVStorePersistGivenUp", "5m", None, {"kvstore_persist_given_up_total": "2x10"}),
    Case("KVStoreEventsLost", "5m", {}, {"kvstore_events_lost_blocks_total": "0 0 900 900 900 900"}),
    Case("KVStoreEventsLost", "5m", None, {"kvstore_events_lost_blocks_total": "900x10"}),
    Case("KVStoreProblem", "7m", {"kind": "credentials", "subject": "na", "level": "problem"}, {_CREDENTIALS: "_ 1x9"}),
    Case("KVStoreProblem", "7m", None, {_CREDENTIALS: "1x3 stale", "kvstore_problem{kind='feed',subject='na',level='warning'}": "1x9"}),
    Case("KVStoreCertificateEnds", "7m", {"kind": "certificate", "subject": "/tls.crt", "level": "warning"}, {_ENDS: "_ 1x9"}),
    Case("KVStoreCertificateEnds", "7m", None, {_ENDS.replace("warning", "problem"): "1x9"}),
    Case("KVStoreMirrorStopped", "5m", {"job": "kvstore-mirror"}, {"up{job='kvstore-mirror'}": "1 0x9"}),
    Case("KVStoreMirrorStopped", "5m", None, {"up{job='kvstore-mirror'}": "1 0 1 0 0 1 1"}),
    Case("KVStoreMirrorLate", "9m", {"source": "na"}, {"kvstore_mirror_oldest_age_seconds{source='na'}": "950+60x10"}),
    Case("KVStoreMirrorLate", "9m", None, {"kvstore_mirror_oldest_age_seconds{source='na'}": "40x10"}),
]  # fmt: skip


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def series(case: Case) -> list[dict[str, str]]:
    """With the labels that a scrape adds, where it has no other ones."""

    def node(series: str) -> str:
        return ",".join(f"{name}='{text}'" for name, text in NODE.items() if f"{{{name}=" not in series)

    named = (
        (name.replace("{", f"{{{node(name)},") if "{" in name else f"{name}{{{node(name)}}}", values)
        for name, values in case.series.items()
    )
    return [{"series": name, "values": values} for name, values in named]


def promtool_test(case: Case) -> dict[str, Any]:
    """As promtool wants it."""
    severity = {"severity": alerts()[case.alert]["labels"]["severity"]}
    expected = [] if case.fires is None else [{"exp_labels": {**NODE, **severity, **case.fires}}]
    asked = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}
    return {"interval": pace(case), "input_series": series(case), "alert_rule_test": [asked]}


def pace(case: Case) -> str:
    """Of samples and evaluations."""
    return "5m" if case.alert == "KVStoreHitRateFell" else "1m"


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """promtool, over the rules without their texts: every case fires or is silent as written down here."""
    bare = yaml.safe_load(RULES.read_text())
    for rule in bare["groups"][0]["rules"]:
        rule.pop("annotations", None)  # promtool would compare every word of them
    (tmp_path / "rules.yml").write_text(json.dumps(bare))
    files = []
    for every in ("1m", "5m"):
        tests = [promtool_test(case) for case in CASES if pace(case) == every]
        files.append(tmp_path / f"tests-{every}.yml")
        files[-1].write_text(
            json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": every, "tests": tests})
        )
    words = ["promtool", "test", "rules", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_problem_of_any_process_has_an_alert() -> None:
    """KVStoreProblem leaves out what only daemons have, and a figure of theirs has an alert for; whoever else may have it too has it by kind."""
    left_out = set(re.findall(r'kind!~"([^"]+)"', alerts()["KVStoreProblem"]["expr"])[0].split("|"))
    by_figure = {
        "books": "kvstore_healthy",
        "disk": "kvstore_disk_state",
        "damage": "kvstore_corrupt_nvme_total",
        "breaker": "kvstore_breaker_open",
    }
    by_kind = {kind: f'kvstore_problem{{kind="{kind}"}}' for kind in ("not_joined",)}
    assert left_out == by_figure.keys() | by_kind.keys()
    for named in (by_figure | by_kind).values():
        assert any(named in rule["expr"] for rule in alerts().values()), named


def test_each_alert_has_a_case_for_both() -> None:
    """No alert without one case in which it fires and one in which it does not."""
    firing = {case.alert for case in CASES if case.fires is not None}
    silent = {case.alert for case in CASES if case.fires is None}
    assert set(alerts()) == firing == silent


@needs_promtool
def test_prometheus_takes_the_files() -> None:
    """`promtool check` finds nothing wrong in the configuration and in the texts of the rules."""
    done = subprocess.run(
        ["promtool", "check", "config", str(RULES.with_name("scrape.yml"))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_its_page() -> None:
    """docs/alerts.md has a section for each alert and no other, and each rule names it, says what, and how urgent it is."""
    text = (ROOT / "docs/alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(alerts())
    for name, section in sections.items():
        assert all(f"**{word}**" in section for word in ("It means", "Look at", "Do")), name
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})


def metrics_in(expression: str) -> set[str]:
    """Names of metrics, with those of a histogram's rows."""
    return set(re.findall(r"\bkvstore_[a-z_0-9]+", expression))


def is_known(name: str) -> bool:
    base = name.removesuffix("_bucket")
    return name in METRICS or (base in METRICS and METRICS[base].kind == "histogram")


def test_each_metric_of_the_rules_is_one() -> None:
    """Rules name metrics that there are."""
    for rule in rules():
        unknown = [name for name in metrics_in(rule["expr"]) if not is_known(name)]
        assert not unknown, (rule, unknown)
