"""The dashboard: Grafana would take it, its metrics exist, and every panel has data from a daemon at work."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.client import Client, Refused
from tests.deploy.test_alerts import RULES, is_known, metrics_in
from tests.region.regions import arguments, chain, init, read, regions_file, space_of, store
from tests.running import ROOT, TIMEOUT_S, Daemon, Place
from tests.web.asked import until, url_of

Serve = Callable[..., Daemon]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/kvstore.json").read_text())
KINDS = {"row", "stat", "timeseries", "heatmap", "state-timeline"}
COLUMNS = 24
DATA_S_MAX = 60.0  # until each panel has some; a dozen scrapes on an idle machine

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """(panel and letter, PromQL) of everything that is asked."""
    return [(f"{p['title']} {t['refId']}", t["expr"]) for p in panels() for t in p["targets"]]


def filled(expression: str) -> str:
    """As Grafana asks with everything selected, and scrapes of a second."""
    for name in ("job", "instance", "model", "tenant"):
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "10s")


def test_it_can_be_imported() -> None:
    """Ids and titles are unique, no panel lies over another or beyond the edge, and each has a unit and something to ask."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    assert {panel["type"] for panel in DASHBOARD["panels"]} == KINDS
    boxes = [(p["title"], p["gridPos"]) for p in DASHBOARD["panels"]]
    for _, box in boxes:
        assert box["x"] >= 0 and box["w"] > 0 and box["h"] > 0 and box["x"] + box["w"] <= COLUMNS
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one, other)
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]


def test_whoever_imports_it_chooses_the_data() -> None:
    """Every panel, question and variable asks the data source that is chosen above, and every question takes the variables."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    first, *others = DASHBOARD["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert [variable["name"] for variable in others] == ["job", "instance", "model", "tenant"]
    asked = [*others, *panels(), *(target for panel in panels() for target in panel["targets"])]
    assert all(each["datasource"] == chosen for each in asked)
    for name, expression in expressions():
        for metric in expression.split("kvstore_")[1:]:
            assert 'job=~"$job", instance=~"$instance"' in metric, name
    assert "uid" in DASHBOARD and DASHBOARD.get("id") is None


def test_each_metric_of_it_is_one() -> None:
    """Panels and variables name metrics that there are."""
    asked = [
        *(text for _, text in expressions()),
        *(v["query"]["query"] for v in DASHBOARD["templating"]["list"][1:]),
    ]
    unknown = {name for text in asked for name in metrics_in(text) if not is_known(name)}
    assert not unknown


@contextlib.contextmanager
def prometheus(path: Path, target: str) -> Iterator[str]:
    """A server with deploy/prometheus as it is, but for target and pace. Yields its address."""
    settings = yaml.safe_load(RULES.with_name("scrape.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(RULES)]
    del settings["scrape_configs"][1:]  # no mirror runs here
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (path / "scrape.yml").write_text(json.dumps(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    words = [
        f"--config.file={path}/scrape.yml",
        f"--storage.tsdb.path={path}/tsdb",
        f"--web.listen-address={listen}",
    ]
    with open(path / "prometheus.log", "w") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def answer(url: str, path: str, **query: str) -> Any:
    """None while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as reply:
            return json.load(reply)["data"]
    except OSError:
        return None


def has_data(url: str, expression: str) -> bool:
    """At least one row that is a number."""
    told = answer(url, "/api/v1/query", query=expression)
    return told is not None and any(not math.isnan(float(row["value"][1])) for row in told["result"])


def at_work(place: Place, stop: threading.Event) -> None:
    """An engine: it stores more than the arena holds, reads it back from NVMe, asks for what nobody has, and is refused once."""
    with Client(place.socket, timeout_s=30, label="engine") as client:
        space = space_of(client, "a tenant")
        prompts = [chain(number, 40) for number in range(12)]  # 30 MiB; the arena has 16
        with contextlib.suppress(Refused):
            client.pin(b"nobody has this" * 2, "ffff")
        number = 0
        while not stop.is_set():
            prompt = prompts[number % len(prompts)]
            number += 1
            store(client, space, prompt if number <= len(prompts) else chain(number, 2))
            tokens = 64 * (len(prompt) + 1)
            client.lookup(
                [space], [*prompt, b"?" * 32], ticket=number, tokens=tokens, prefill_tokens_per_s=1000
            )
            read(client, space, prompt)
            stop.wait(0.05)


@needs_prometheus
def test_every_panel_has_data(place: Place, serve: Serve, tmp_path: Path) -> None:
    """A real Prometheus scrapes a daemon with everything at work: each question of the dashboard has an answer, and no alert fires."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    daemon = serve(
        place,
        *arguments(place, file, "na", f"--set=nvme.directories={place.path / 'nvme'}"),
        "--set=nvme.write_bytes_per_day=100GiB",
        f"--set=events.endpoint=ipc://{place.path}/events",
        "--set=web.listen=127.0.0.1:0",
    )
    target = urllib.parse.urlsplit(url_of(daemon)).netloc
    stop = threading.Event()
    engine = threading.Thread(target=at_work, args=(place, stop))
    engine.start()
    try:
        with prometheus(tmp_path, target) as url:
            waiting = dict(expressions())

            def all_have() -> bool:
                for name in [name for name, text in waiting.items() if has_data(url, filled(text))]:
                    del waiting[name]
                return not waiting

            give_up_s = time.monotonic() + DATA_S_MAX
            while not all_have() and time.monotonic() < give_up_s:
                time.sleep(0.3)
            assert not waiting, (list(waiting), (tmp_path / "prometheus.log").read_text()[-2000:])
            rules = until(lambda: answer(url, "/api/v1/rules"), "the rules are known")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} == {"ok"}
            firing = {alert["labels"]["alertname"] for alert in answer(url, "/api/v1/alerts")["alerts"]}
            assert not firing - {"KVStoreRefusing"}
    finally:
        stop.set()
        engine.join(TIMEOUT_S)
