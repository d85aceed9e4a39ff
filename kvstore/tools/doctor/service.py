"""What the daemon says of itself: its problems, refusals, damaged bytes, and the engines that use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from kvstore.ledger.engines import in_words
from kvstore.tools.doctor.findings import Finding, Status
from kvstore.tools.doctor.software import tested_vllm, within
from kvstore.units import count, format_duration, percent, plural

_REFUSED = {
    "wrong_peer": "an engine runs as another user than the daemon: only that user and root may attach",
    "too_many_connections": "raise door.connections_max, or look for a process that leaks connections",
    "lease_expired": "an engine hangs, or leaks leases: its log says more",
    "wrong_protocol": "an engine has another version of kvstore: install the daemon's there",
    "limit_exceeded": "the log names the limit (door.leases_max, models.dram_bytes, …) and the process: raise it, or ask it for less",
    "too_slow": "an engine stopped reading its answers: is it stopped, or starved of CPU?",
}
# By the counter corrupt_<level>: what came back wrong, and what to look at.
_DAMAGED = {
    "dram": ("of dram", "memtest of the machine; the log names the blocks"),
    "nvme": ("of nvme", "smartctl -a of the disks, memtest of the machine"),
    "shared": (
        "of a bucket",
        "kvstore region verify NAME --deep finds its damaged packs; look at the network, too",
    ),
}
# Of a namespace's fields, those of hashing: who differs only there computes the same KV and shares nothing.
_HASHING = ("hash", "hash seed")
_COLD_BLOCKS_MIN = 1000  # asked for: of less nothing is said
_WARM_SHARE = 0.2  # of what is asked for; beside less nobody is cold
_COLD_SHARE = 0.25  # of what the warmest finds
_OF_SIZE = ("record bytes", "column bytes")


def problems(status: Status) -> Iterator[Finding]:
    """What the daemon itself knows to be wrong: the same list as in `kvstore status`."""
    now_s = status["daemon"]["now_s"]
    for one in status["problems"]:
        often = f", {count(one['count'])} times" if one["count"] > 1 else ""
        found = f"{one['subject']}: {one['text']} (for {format_duration(max(0.0, now_s - one['since_s']))}{often})"
        yield Finding(one["kind"].replace("_", " "), one["level"], found, one["fix"])
    if not status["problems"]:
        yield Finding("daemon", "ok", "it knows of no problem")


def damage(status: Status) -> Iterator[Finding]:
    """What came back wrong since the start; of the last minutes the daemon itself says it."""
    for level, (what, action) in _DAMAGED.items():
        blocks = status["counters"].get(f"corrupt_{level}", 0)
        if blocks:
            found = f"{plural(blocks, 'block')} {what} came back with other bytes since the start; they were misses"
            yield Finding("damage", "note", found, action)


def refusals(status: Status) -> Iterator[Finding]:
    """Who was turned away at the door, and why."""
    refused: Mapping[str, int] = status["door"]["refused"]
    for code, times in sorted(refused.items(), key=lambda item: -item[1]):
        if code in _REFUSED:
            yield Finding("refused", "warning", f"{code}, {plural(times, 'time')}", _REFUSED[code])
    others = {code: times for code, times in refused.items() if code not in _REFUSED}
    if others:
        said = ", ".join(f"{code} {count(times)}" for code, times in sorted(others.items()))
        yield Finding("refused", "note", f"since the start: {said}", "the log says which requests")
    if not refused:
        yield Finding("refused", "ok", "nobody, since the start")


def engines(status: Status) -> Iterator[Finding]:
    """Engines of one model that share nothing although they compute the same."""
    spaces = status["namespaces"]
    if not spaces:
        found = f"no engine has stored anything in {format_duration(status['daemon']['uptime_s'])}"
        action = "an engine with the connector says `kvstore: connected` in its log: docs/vllm.md"
        yield Finding("engines", "note", found, action)
        return
    found_any = False
    for finding in (*_unshared(spaces), *_kinds(status), *_cold(status), *_releases(spaces)):
        found_any = True
        yield finding
    if not found_any:
        yield Finding(
            "engines", "ok", f"{plural(status['namespaces_total'], 'namespace')}, none of them in vain"
        )


def _unshared(spaces: list[Status]) -> Iterator[Finding]:
    """Namespaces that are equal but for how block hashes are made, or for the connector's format."""
    for what, ignored, action in (
        ("hash algorithm or seed", _HASHING,
         "give all of them one PYTHONHASHSEED and one --prefix-caching-hash-algo"),
        ("format of the connector", ("format",), "install one version of kvstore for all engines"),
    ):  # fmt: skip
        alike: dict[tuple[tuple[str, str], ...], list[Status]] = defaultdict(list)
        for space in spaces:
            fields = space["fields"]
            if "hash" in fields:
                key = {n: v for n, v in fields.items() if n not in ignored and n not in _OF_SIZE}
                alike[tuple(sorted(key.items()))].append(space)
        for group in alike.values():
            said = {tuple(space["fields"].get(name, "") for name in ignored) for space in group}
            if len(said) > 1:
                in_use = {tuple(s["fields"].get(n, "") for n in ignored) for s in group if s["users"]}
                model = group[0]["fields"].get("model", "") or "one model"
                found = f"{len(said)} kinds of engines of {model} differ in {what} only: they share nothing"
                yield Finding("engines", "warning" if len(in_use) > 1 else "note", found, action)


def _kinds(status: Status) -> Iterator[Finding]:
    """Kinds of engines of one model and tenant, which may be as wanted, and share nothing."""
    for one in status["holdings"]:
        if {row["field"] for row in one["differs"]} - {*_HASHING, "format"}:
            found = f"{one['kinds']} kinds of engines of {_whose(one)} differ in {in_words(one['differs'])}"
            action = "they share nothing with each other; kvstore explain --engines has all that differs"
            yield Finding("engines", "note", found, action)


def _cold(status: Status) -> Iterator[Finding]:
    """Who finds little beside others of its model and tenant who find much, where all of them are of one kind: of kinds the daemon
    itself knows it."""
    if any(one["differs"] for one in status["holdings"]):
        return
    peers: dict[tuple[str, str], list[Status]] = defaultdict(list)
    for session in status["sessions"]:
        peers[session["model"], session["tenant"]].append(session)
    for sessions in peers.values():
        for cold, warm in _beside(sessions):
            names = (f"{one['label'] or 'unnamed'} (pid {one['pid'] or '?'})" for one in (cold, warm))
            found = f"{next(names)} {_found(cold)}, {next(names)} of the same model and tenant {_found(warm)}"
            action = "other prompts, or what differs early in them (a date, a salt)? kvstore explain of one of each"
            yield Finding("engines", "note", found, action)


def _beside(rows: list[Status]) -> Iterator[tuple[Status, Status]]:
    """Of those who asked for enough to say so: who is cold, and the warmest."""
    rows = [row for row in rows if row["asked_blocks"] >= _COLD_BLOCKS_MIN]
    warm = max(rows, key=_share, default=None)
    if warm is not None and _share(warm) >= _WARM_SHARE:
        yield from ((row, warm) for row in rows if _share(row) < _COLD_SHARE * _share(warm))


def _share(row: Status) -> float:
    return float(row["hit_blocks"] / row["asked_blocks"])


def _found(row: Status) -> str:
    return f"found {percent(_share(row))} of {plural(row['asked_blocks'], 'block')} asked for"


def _whose(names: Mapping[str, str]) -> str:
    return f"{names.get('model') or '(no model)'}, tenant {names.get('tenant') or '(none)'},"


def _releases(spaces: list[Status]) -> Iterator[Finding]:
    """Releases of vLLM that the connector was never tried with."""
    tested = tested_vllm()
    for release in sorted({space["fields"].get("vllm", "") for space in spaces} - {""}):
        if tested and not within(release, tested):
            yield Finding("engines", "warning", f"an engine is vLLM {release}", f"tested is vLLM {tested}")
