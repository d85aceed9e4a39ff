"""What a running daemon holds and does.

  kvstore status                       tables, for people
  kvstore status -o json               the whole report; docs/cli.md lists its fields

`kvstore top` shows it live. Exit code 1 when the last self-check found problems, or a directory or the socket
is not as it must be; 0 with problems of other kinds, for any of which that of `kvstore doctor` is 1; 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.ledger.engines import in_words
from kvstore.tools.cli import FAILED, OK
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments
from kvstore.tools.cli.output import HASH_DIGITS_SHOWN, Figure, is_terminal, present, print_table, say
from kvstore.tools.cli.prefixes import ask
from kvstore.tools.problems import how_it_is, in_lines
from kvstore.units import NOTHING, format_bytes, format_duration, format_time, percent, plural, printable

if TYPE_CHECKING:
    from kvstore.protocol import answers

FIELDS_SHOWN = ("model", "tenant", "group")  # of a namespace, where there are any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "table", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    report = ask(args, "status", lambda client: client.status())
    if "health" not in report:  # to who asks as a tenant
        return present(args, report, lambda own: _print_namespaces(own["namespaces"]))
    present(args, report, _print)
    return OK if report["health"]["ok"] else FAILED


def _print(report: answers.Status) -> None:
    _print_head(report)
    _print_tiers(report)
    _print_lists(report)


def _print_head(report: answers.Status) -> None:
    daemon, arena = report["daemon"], report["arena"]
    capacity_bytes = report["tiers"][0]["capacity_bytes"]
    up = f"up {format_duration(daemon['uptime_s'])}"
    say(
        f"kvstore {daemon['version']}, pid {daemon['pid']}, {up}, at {format_time(daemon['now_s'], True)} UTC"
    )
    say(f"health      {how_it_is(report['problems'])}", 12)
    for line in in_lines(report["problems"], daemon["now_s"]):
        say(line, 12)
    touched = f"{format_bytes(arena['prefaulted_bytes'])} of {format_bytes(capacity_bytes)}"
    say(f"arena       {arena['path']} ({arena['pages']} pages, prefaulted {touched})", 12)
    under_way = {
        "loads": report["loading_blocks"],
        "stores": report["demoting_blocks"],
        "adopted blocks to verify": report["unverified_blocks"],
        "slots in quarantine": arena["quarantined_slots"],
    }
    if report["adopting"]:
        say("start       still reading the rows of NVMe; nothing is written there meanwhile", 12)
    say(f"under way   {', '.join(f'{count} {what}' for what, count in under_way.items())}", 12)
    counters = report["counters"]
    asked, hit = counters["lookup_blocks"], counters["lookup_hit_blocks"]
    share = percent(hit / asked) if asked else "nothing asked yet"
    found = f"{hit} of {asked} blocks found ({share}), those that engines had themselves counted too"
    say(f"lookups     {counters['lookups']}: {found}", 12)
    if report["region"] is not None:
        _print_region(report["region"], counters)
    if report["events"] is not None:
        _print_events(report["events"])
    for preload in report["preloads"]:
        _print_preload(preload)
    say()


def _print_preload(preload: answers.Preload) -> None:
    """A model that should be on this node's disk."""
    far = ""
    if preload["state"] == "running" and preload["bytes"]:
        done = percent(1 - preload["left_bytes"] / preload["bytes"])
        far = f": {done} of {format_bytes(preload['bytes'])}, {format_bytes(preload['bytes_per_s'])}/s"
    why = f": {preload['problem']}" if preload["problem"] else ""
    say(f"model       {preload['model']}: {preload['state']}{far}{why}", 12)


def _print_events(events: answers.Events) -> None:
    """What routers are told."""
    if events["problem"]:
        say(f"events      nothing is published any more: {events['problem']}", 12)
        return
    told = f"{events['batches']} messages, {events['stored_blocks']} blocks stored, {events['removed_blocks']} removed"
    say(f"events      {events['endpoint']}: {told}, {events['lost_blocks']} lost", 12)
    asked = f"{events['replays']} replays and {events['full_states']} full states asked for"
    say(f"            {asked}, {events['answers_lost']} not taken", 12)


def _print_region(region: Mapping[str, Any], counters: Mapping[str, int]) -> None:
    _print_bucket("region", region)
    if region["open"]:
        put = f"{counters['packs_persisted']} packs put ({format_bytes(counters['persisted_bytes'])})"
        say(f"            {put}, {_fetched(region)}", 12)
    for far in region["read_through"]:
        _print_bucket("far region", far)
        if far["open"]:
            say(f"            {_fetched(far)}", 12)


def _print_bucket(what: str, region: Mapping[str, Any]) -> None:
    """A region, and what is known of it."""
    if not region["open"]:
        name = f"{region['name']}: " if "name" in region else ""  # of our own it is in the settings
        say(f"{what:<12}{name}not joined: {region['problem'] or 'joining'}", 12)
        return
    age_s = region["feed_age_s"]
    known = f"{region['packs']} packs, {region['blocks']} blocks, {format_bytes(region['bytes'])}"
    read = f"read {format_duration(age_s)} ago" if age_s is not None else "not read yet"
    say(f"{what:<12}{region['name']} in {region['bucket']}: {known} durable; feed {read}", 12)
    if "keeps" in region:
        say(f"            {_kept(region)}", 12)
    if region["feed_gaps"] or region["feed_damaged"]:
        say(f"            feed: {region['feed_gaps']} gaps, {region['feed_damaged']} damaged", 12)


def _kept(region: Mapping[str, Any]) -> str:
    if not region["keeper"]:
        return f"kept by nobody for {format_duration(region['keeper_age_s'])}"
    who = "this node" if region["keeps"] else region["keeper"]
    return f"kept by {who} for {format_duration(region['kept_s'])}"


def _fetched(region: Mapping[str, Any]) -> str:
    wrong = f", {region['corrupt_records']} with wrong bytes" if region["corrupt_records"] else ""
    return f"{region['fetched_records']} records fetched ({format_bytes(region['fetched_bytes'])}){wrong}"


def _print_tiers(report: answers.Status) -> None:
    counters = report["counters"]
    rows = [
        [
            tier["name"],
            format_bytes(tier["capacity_bytes"]),
            format_bytes(tier["used_bytes"]),
            Figure(percent(tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0)),
            tier["records"],
            *(counters.get(f"{what}_{tier['name']}", 0) for what in ("acquired", "evicted", "corrupt")),
        ]
        for tier in report["tiers"]
    ]
    columns = ["tier", "capacity", "used", "used %", "records", "handed out", "evicted", "corrupt"]
    print_table("tiers", columns, rows, drop=("corrupt", "evicted", "handed out", "records"))
    print_disks([disk for disk in report["disks"] if disk["level"]])
    _print_models(report)
    _print_health(report)


def _print_models(report: answers.Status) -> None:
    if models := report["models"]:
        rows = [
            [
                m["name"],
                m["revision"],
                m["state"],
                format_bytes(m["bytes"]),
                m["users"],
                format_duration(m["idle_s"]),
            ]
            for m in models
        ]
        print_table("models in DRAM", ["name", "revision", "state", "size", "users", "idle"], rows)


def print_disks(disks: Sequence[answers.Disk]) -> None:
    """A row for each NVMe directory; what is wrong stands in lines of its own."""
    if not disks:
        return
    rows = [
        [
            disk["level"] or NOTHING,
            printable(disk["directory"]),
            printable(disk["file_system"]),
            disk["state"],
            Figure(NOTHING) if disk["records"] is None else disk["records"],
            NOTHING if disk["used_bytes"] is None else format_bytes(disk["used_bytes"]),
            format_bytes(disk["room_bytes"]),
        ]
        for disk in disks
    ]
    columns = ["level", "directory", "on", "state", "records", "used", "of"]
    print_table("NVMe directories", columns, rows, drop=("on", "records"))


def _print_health(report: answers.Status) -> None:
    for speed in report["speeds"]:
        if speed["samples"]:
            took = f"{1e3 * speed['latency_s']:.2f} ms, then {format_bytes(speed['bytes_per_s'])}/s"
            waiting = f", {format_bytes(speed['waiting_bytes'])} wait" if speed["waiting_bytes"] else ""
            say(f"{speed['name']:<11} loads take {took}{waiting}", 12)
    for breaker in report["breakers"]:
        if breaker["trips"]:
            trips = plural(breaker["trips"], "trip")
            where = f" ({breaker['directory']})" if breaker["directory"] else ""
            state = f"{breaker['state']}; {trips}, the last one: {breaker['reason']}"
            say(f"breaker     {breaker['name']}{where}: {state}", 12)
    say()


def _print_lists(report: answers.Status) -> None:
    if report["sessions"]:
        rows = [
            [s["id"], s["label"], s["pid"] or "?", s["uid"], s["model"], format_duration(s["connected_s"]), s["leases"]]
            for s in report["sessions"]
        ]  # fmt: skip
        columns = ["id", "label", "pid", "uid", "model", "since", "leases"]
        print_table("sessions (kvstore clients has more)", columns, rows, ("uid", "model", "since", "pid"))
    if report["holdings"]:
        print_holdings(report["holdings"])
    if report["namespaces"]:
        _print_namespaces(report["namespaces"])
        if (left := report["namespaces_total"] - len(report["namespaces"])) > 0:
            say(f"… and {plural(left, 'more namespace')}, with fewer blocks")
            say()


def print_holdings(holdings: Sequence[answers.Holding]) -> None:
    """What is held now of each model and tenant, and what tells its kinds of engines apart."""
    rows = [
        [
            one["model"] or "(none)",
            one["tenant"] or "(none)",
            format_bytes(one["dram_bytes"]),
            format_bytes(one["nvme_bytes"]),
            one["blocks"],
            Figure(percent(one["hit_blocks"] / one["asked_blocks"]) if one["asked_blocks"] else ""),
        ]
        for one in holdings
    ]
    columns = ["model", "tenant", "in DRAM", "on NVMe", "blocks", "blocks hit"]
    print_table("held now, by model and tenant", columns, rows, ("blocks hit", "blocks", "tenant"))
    for one in holdings:
        if one["differs"]:
            who = f"{one['model'] or '(none)'}, tenant {one['tenant'] or '(none)'}"
            say(f"{one['kinds']} kinds of engines of {who} share nothing: they differ in")
            say(f"  {in_words(one['differs'])}", 4)
            say()


def _print_namespaces(spaces: Sequence[answers.Namespace]) -> None:
    """What people tell them apart by; -o json has all fields."""
    shown = [name for name in FIELDS_SHOWN if any(n["fields"].get(name) for n in spaces)]
    rows = [
        [
            n["digest"][: HASH_DIGITS_SHOWN if is_terminal() else 12],
            *(n["fields"].get(name, "") for name in shown),
            n["blocks"],
            format_bytes(n["dram_bytes"]),
            format_bytes(n["nvme_bytes"]),
            Figure(percent(n["hit_blocks"] / n["asked_blocks"]) if n["asked_blocks"] else ""),
            format_bytes(n["record_bytes"]),
            n["block_tokens"],
            ", ".join(f"{name} {value}" for name, value in n["differs"].items()),
        ]
        for n in spaces
    ]
    columns = ["digest", *shown, "blocks", "DRAM", "NVMe", "blocks hit", "record", "tokens", "differs in"]
    drop = ("tokens", "record", "NVMe", "DRAM", "blocks hit", "group", "tenant")
    if not any(n["differs"] for n in spaces):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    print_table("namespaces", columns, rows, drop=drop)
