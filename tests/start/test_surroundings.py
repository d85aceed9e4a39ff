"""What a daemon sees go wrong around it and in its traffic: told while it is so, and not a moment longer than a window."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.daemon.config.config import Config
from kvstore.daemon.surroundings import CALM_BYTES, SHORT_BYTES, Surroundings
from kvstore.daemon.traffic import LATELY_S, LOOK_S, Lately
from kvstore.units import format_bytes
from tests.security import certificates
from tiers.dram.memory_limits import Limit

GIB = 1 << 30


class AtOnce:
    """I/O threads whose work is done before anybody can look."""

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Any, urgent: bool = False
    ) -> None:
        done(work())


def around(config: Config, clock: list[float], free: list[int], is_short: bool = False) -> Surroundings:
    arena = SimpleNamespace(is_short=is_short, capacity_bytes=2 * GIB, backed_bytes=GIB)
    return Surroundings(
        config, arena, AtOnce(), lambda: clock[0], lambda: [Limit("this machine", 8 * GIB, free[0])]
    )


def found(surroundings: Surroundings, clock: list[float]) -> list[tuple[str, str]]:
    clock[0] += 60.0
    surroundings.look()
    return [(problem.kind, problem.subject) for problem in surroundings.wrong()]


def test_memory_that_runs_out() -> None:
    """Of a limit that is nearly reached, until there is some more than that; and of an arena that has not all of its own yet."""
    clock, free = [0.0], [GIB]
    it = around(Config(), clock, free)
    assert found(it, clock) == []
    free[0] = SHORT_BYTES - 1
    assert found(it, clock) == [("memory", "this machine")]
    [problem] = it.wrong()
    assert format_bytes(SHORT_BYTES - 1) in problem.text and "dram.capacity_bytes" in problem.fix
    free[0] = CALM_BYTES - 1
    assert found(it, clock) == [("memory", "this machine")]
    free[0] = CALM_BYTES
    assert found(it, clock) == []
    short = around(Config(), clock, free, is_short=True)
    assert found(short, clock) == [("memory", "arena")]


def test_a_certificate_that_expires(tmp_path: Path) -> None:
    """Of a door that others can reach: until another one is in its place, and no word of one that is not used."""
    authority = certificates.Authority()
    files = certificates.write(tmp_path, *authority.signed(), authority.pem)
    security = {
        "certificate_file": str(files.certificate),
        "key_file": str(files.key),
        "ca_file": str(files.ca),
    }
    config = Config.model_validate({"security": security, "grpc": {"listen": "127.0.0.1:1"}})
    clock, free = [0.0], [GIB]
    it = around(config, clock, free)
    unused = around(Config.model_validate({"security": security, "web": {"listen": ""}}), clock, free)
    assert found(it, clock) == []
    expired = authority.signed(begins=-timedelta(days=2), ends=-timedelta(hours=1))
    certificates.write(tmp_path, *expired, authority.pem)
    assert found(it, clock) == [("certificate", str(files.certificate))]
    assert "expired" in next(it.wrong()).text and found(unused, clock) == []
    ends = authority.signed(begins=-timedelta(days=300), ends=timedelta(days=5))
    certificates.write(tmp_path, *ends, authority.pem)
    assert found(it, clock) == [("certificate", str(files.certificate))]
    [problem] = it.wrong()
    assert (problem.level, "clients refuse it from" in problem.text) == ("warning", True) and problem.fix
    files.certificate.write_bytes(b"rubbish")
    assert "stay in use" in (found(it, clock) and next(it.wrong()).text)
    certificates.write(tmp_path, *authority.signed(), authority.pem)
    assert found(it, clock) == []


def test_what_has_grown_lately() -> None:
    """Sums less what they were at the begin of the window, or when they were first seen; what has stopped growing is over with it."""
    sums: dict[str, tuple[int, ...]] = {"a": (100, 7)}
    lately = Lately[str](lambda: dict(sums))
    assert dict(lately.grown()) == {"a": (0, 0)}
    for second in range(0, int(LATELY_S), int(LOOK_S)):
        sums["a"] = (100 + second, 7)
        sums.setdefault("b", (9000, 1))
        lately.look(float(second))
    assert dict(lately.grown()) == {"a": (LATELY_S - LOOK_S, 0), "b": (0, 0)}
    lately.look(LATELY_S)
    lately.look(2 * LATELY_S + LOOK_S)
    assert dict(lately.grown()) == {"a": (0, 0), "b": (0, 0)}
