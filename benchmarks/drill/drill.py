"""One fault, from a node that is well to one that is well again.

node is well ─▶ break ─▶ each of the five names it? ─▶ held for a while ─▶ mend ─▶ each is as before?
                  ╰────── seconds, lines of the log ──────╯                 ╰── seconds ──╯
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.drill.fault import Fault, NotHere
from benchmarks.drill.node import Node
from benchmarks.drill.surfaces import SILENT, SURFACES, Said
from kvstore.logs import REPEAT_S, REPEATS_MAX
from tests.start.machine import make_group, remove_group

NAMED_S_MAX: Final = 60.0
GONE_S_MAX: Final = 330.0  # a pack that came back damaged is doubted for so long
HOLD_S: Final = 50.0  # that each fault lasts
WELL_S: Final = 60.0  # for a new node
PAUSE_S: Final = 0.5
HOUR_S: Final = 3600.0
LINES_MAX: Final = 70  # of one fault in an hour
PROBLEM_LINES: Final = 14  # of a problem in an hour: begins, after a minute, each five minutes, is over
CHEAP: Final = "page"
PROBLEMS: Final = "replication.problems"
FIGURES: Final = "figures"  # a line a minute, fault or not


class NotWell(Exception):
    """Before anything was broken."""


@dataclass
class Outcome:
    """named_s, gone_s: seconds by where it was; what is missing did not happen in time. lines: of the log while it lasted; lines_hour:
    in an hour of it, by the log's own rules for what is repeated. said: what people read."""

    fault: str
    named_s: dict[str, float] = field(default_factory=dict)
    gone_s: dict[str, float] = field(default_factory=dict)
    lines: int = 0
    lines_hour: int = 0
    said: str = ""
    to_do: str = ""
    not_here: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        everywhere = len(self.named_s) == len(self.gone_s) == len(SURFACES)
        return bool(self.not_here) or (everywhere and not self.problem and self.lines_hour <= LINES_MAX)


def carry_out(fault: Fault, home: Path, hold_s: float = HOLD_S) -> Outcome:
    """In a directory of its own below `home`."""
    outcome = Outcome(fault.name)
    group = None
    try:
        group = make_group(fault.group_bytes) if fault.group_bytes else None
        with Node(home / fault.name.replace(" ", "-"), fault.regions, group) as node:
            fault.prepare(node)
            node.start()
            before = _well(node)
            _carry_out(fault, node, before, outcome, hold_s)
    except NotHere as error:
        outcome.not_here = str(error)
    except NotWell as error:
        outcome.problem = f"a new node is not well: {error}"
    except Exception as error:  # noqa: BLE001 the next fault still has something to say
        outcome.problem = f"the drill itself failed: {error!r}"
    finally:
        if group is not None:
            remove_group(group)
    return outcome


def _carry_out(
    fault: Fault, node: Node, before: Mapping[str, set[str]], outcome: Outcome, hold_s: float
) -> None:
    log, begun_s = len(node.daemon.log()), time.monotonic()
    fault.break_(node)
    while len(outcome.named_s) < len(SURFACES) and time.monotonic() - begun_s < NAMED_S_MAX:
        for where in _left(outcome.named_s):
            if (said := named(fault, SURFACES[where](node))) is not None:
                outcome.named_s[where] = round(time.monotonic() - begun_s, 1)
                if where == "status":
                    outcome.said, outcome.to_do = (text.replace(str(node.home), "/mnt") for text in said)
    for where in SURFACES.keys() - outcome.named_s.keys():
        outcome.problem += f"{where} says {SURFACES[where](node)} "
    time.sleep(max(0.0, begun_s + hold_s - time.monotonic()))
    lasted_s = time.monotonic() - begun_s
    outcome.lines, outcome.lines_hour = count_lines(node.daemon.log()[log:], lasted_s)
    fault.mend(node)
    begun_s = time.monotonic()
    while len(outcome.gone_s) < len(SURFACES) and time.monotonic() - begun_s < GONE_S_MAX:
        time.sleep(PAUSE_S)
        for where in _left(outcome.gone_s):
            if kinds(SURFACES[where](node)) <= before[where]:
                outcome.gone_s[where] = round(time.monotonic() - begun_s, 1)
    for where in SURFACES.keys() - outcome.gone_s.keys():
        outcome.problem += f"{where} still says {SURFACES[where](node)} "
    if node.traffic.failure is not None:
        outcome.problem += f"wrong bytes: {node.traffic.failure}"


def _left(done: Mapping[str, float]) -> list[str]:
    """Where to look next. All of them read one list, so that commands are begun once the page says it."""
    return [where for where in SURFACES if where not in done] if CHEAP in done else [CHEAP]


def _well(node: Node) -> dict[str, set[str]]:
    """What is said of a node that is well, by where: of this machine, by doctor alone."""
    node.traffic.warm.wait(WELL_S)
    give_up_s = time.monotonic() + WELL_S
    while True:
        said = {where: kinds(surface(node)) for where, surface in SURFACES.items()}
        if not any(kinds for where, kinds in said.items() if where != "doctor"):
            return said
        if time.monotonic() > give_up_s:
            raise NotWell(said)
        time.sleep(PAUSE_S)


def kinds(said: list[Said]) -> set[str]:
    """That a loop is late says that this machine is busy."""
    return {each.line.partition(" ")[0] for each in said} - {"loop"}


def named(fault: Fault, said: list[Said]) -> Said | None:
    """What names it, with what to do."""
    for each in said:
        is_it = each.line == SILENT if fault.silent else any(map(each.names, fault.causes))
        if is_it and each.to_do:
            return each
    return None


def count_lines(log: str, lasted_s: float) -> tuple[int, int]:
    """Lines, but for those of every minute; and how many there are in an hour at most: the log repeats no wording more often than
    it says, and tells of a problem now and then."""
    wordings = Counter[tuple[str, str]]()
    for line in log.splitlines():
        told = json.loads(line)
        logger, event = (
            told.get("logger", ""),
            told.get("event", ""),
        )  # without: what somebody did, for the audit
        if event != FIGURES:
            wordings[logger, event.partition(":")[0] if logger == PROBLEMS else event] += 1
    repeated = REPEATS_MAX + HOUR_S / REPEAT_S
    hour = 0.0
    for (logger, _), count in wordings.items():
        if logger == PROBLEMS:
            hour += PROBLEM_LINES
        else:
            hour += count if count == 1 else min(count * HOUR_S / lasted_s, repeated)
    return sum(wordings.values()), round(hour)
