"""Where people look, and what they read there: status, top, the page, metrics, doctor.

    each ─▶ Said: a line "kind subject: text", what to do, the level          what needs nobody's attention is not among them

Of a daemon that answers nobody a line says only that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Final, NamedTuple

from benchmarks.drill.fault import Cause
from benchmarks.drill.node import Node
from kvstore.tools.cli import UNREACHABLE
from tests.web.asked import get

SILENT: Final = "the daemon does not answer"
OF_MACHINE: Final = ("killed for memory", "arena", "swap")  # what doctor finds that others may do meanwhile
_STATUS = re.compile(r"^(?:PROBLEM|WARNING) +(.*?)(?: \(for [^()]*\))?\n(?: +-> (.*)\n)?", re.MULTILINE)
_METRIC = re.compile(r'^kvstore_problem\{kind="(.*?)",level=".*?",subject="(.*?)"\} 1\.0$', re.MULTILINE)


class Said(NamedTuple):
    line: str
    to_do: str = ""

    def names(self, cause: Cause) -> bool:
        says = "" if self.line.endswith(": ") else cause.says  # a metric
        return re.match(rf"{cause.kind} {cause.subject}: .*{says}", self.line) is not None


def status(node: Node) -> list[Said]:
    done = node.cli("status", f"--socket={node.place.socket}")
    if done.returncode == UNREACHABLE:
        return [Said(SILENT, done.stderr)]
    return [Said(line, to_do) for line, to_do in _STATUS.findall(done.stdout)]


def top(node: Node) -> list[Said]:
    done = node.cli("top", "--interval=0.2s", "--once", f"--socket={node.place.socket}")
    if done.returncode == UNREACHABLE:
        return [Said(SILENT, done.stderr)]
    found: list[list[str]] = []
    lines = iter(done.stdout.splitlines())
    for line in lines:
        if line.startswith("! "):
            found.append([line[2:], ""])
        elif found and line.startswith("  → "):
            found[-1][1] = line[4:]
        elif found and line.startswith("    "):
            found[-1][1] += " " + line.strip()
        elif found and line.startswith("  "):
            found[-1][0] += " " + line.strip()
        elif found:
            break
    return [Said(*each) for each in found]


def page(node: Node) -> list[Said]:
    try:
        told = get(node.url, "/live.json").json()
    except (OSError, HTTPException) as error:
        return [Said(SILENT, str(error))]
    if not told["up"]:
        return [Said(SILENT, told["problem"])]
    return [
        Said(f"{one['kind']} {one['subject']}: {one['text']}", one["fix"]) for one in told["live"]["problems"]
    ]


def metrics(node: Node) -> list[Said]:
    """Names have no room for reasons: the alert says where to read them."""
    try:
        text = get(node.url, "/metrics").text
    except (OSError, HTTPException) as error:
        return [Said(SILENT, str(error))]
    if "\nkvstore_up 0.0\n" in text:
        return [Said(SILENT, "docs/alerts.md#kvstoredown")]
    unescaped = text.replace('\\"', "'")
    return [
        Said(f"{kind} {subject}: ", "docs/alerts.md#kvstoreproblem")
        for kind, subject in _METRIC.findall(unescaped)
    ]


def doctor(node: Node) -> list[Said]:
    findings = json.loads(node.cli("doctor", "-o", "json", *node.words).stdout)["findings"]
    of_node = [one for one in findings if one["check"] not in OF_MACHINE]
    said = [one for one in of_node if one["level"] in ("problem", "warning")]
    found = [Said(f"{one['check'].replace(' ', '_')} {one['found']}", one["action"]) for one in said]
    is_silent = any(one["check"] == "socket" and "does not answer" in one["found"] for one in said)
    return (
        [Said(SILENT, next(one["action"] for one in said if one["check"] == "socket"))]
        if is_silent
        else found
    )


SURFACES: Mapping[str, Callable[[Node], list[Said]]] = {
    "status": status,
    "top": top,
    "page": page,
    "metrics": metrics,
    "doctor": doctor,
}
