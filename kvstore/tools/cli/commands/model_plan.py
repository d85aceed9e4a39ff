"""How long until a model serves on new nodes, stage by stage, and what holds it back: on paper.

  kvstore model plan NAME --nodes 50 --nic 100Gbps --nvme 14GBps --store 2Tbps --devices 8
  kvstore model plan --size 640GiB --nodes 1 --nic 400Gbps --nvme 28GBps --store 400Gbps
  kvstore model plan NAME --measure --directory DIR      with what this machine's disk, memory and store do, where no option says it

NAME is a model of the bucket, whose size it has. Rates: Gbps is bits, GBps or GB/s bytes, both decimal. --measure writes and reads
256 MiB in DIR, leaving nothing, copies memory for a moment, and reads up to 512 MiB of NAME from the bucket. How long an engine starts and
compiles is not ours: --start and --compile say it, else it is what was seen of large models on 8 devices (docs/models.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.constants import TIB
from kvstore.tools.cli import FAILED, NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import add_model_name, duration, size, whole
from kvstore.tools.cli.output import Figure, present, print_table
from kvstore.units import NOTHING, format_bytes, format_duration, format_rate, parse_rate, plural

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects

RATES = {
    "nic": "of a node's network card",
    "nvme": "of all drives of a node",
    "store": "of the bucket, to all nodes together",
    "memory": "of a node's memory, two threads that copy",
    "link": "between memory and one device",
}
RATE_MAX, MACHINES_MAX = 1e15, 1_000_000
DAY_S = 86_400.0


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, nargs="?", default="", metavar="NAME", help="NAME or NAME@REVISION")
    parser.add_argument("--size", default="", metavar="SIZE", help="of a model that is not in the bucket")
    parser.add_argument(
        "--nodes", type=whole(1, MACHINES_MAX), default=1, metavar="K", help="that start at once (default 1)"
    )
    parser.add_argument(
        "--devices", type=whole(1, MACHINES_MAX), default=1, metavar="N", help="of a node (default 1)"
    )
    for rate, summary in RATES.items():
        parser.add_argument(f"--{rate}", default="", metavar="RATE", help=summary)
    parser.add_argument("--start", default="", metavar="TIME", help="of an engine whose caches are warm")
    parser.add_argument("--compile", default="", metavar="TIME", help="more where they are not")
    parser.add_argument("--measure", action="store_true", help="this machine, for what no option says")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="whose disk is measured")
    add_bucket_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.fleet.plan import Machines, plan

    _check(args)
    given = {rate: _rate(rate, text) for rate in RATES if (text := getattr(args, rate))}
    given |= {
        f"{what}_s": duration(f"model plan: --{what}", text, 0.0, DAY_S)
        for what in ("start", "compile")
        if (text := getattr(args, what))
    }
    found = {"nvme"} if args.measure else set()
    if args.measure and args.name and "store" not in given:
        found |= {"nic", "store"}  # through our card
    _require([rate for rate in ("nic", "nvme", "store") if rate not in found], given)
    measured, size_bytes = _asked(args, given)
    known = {**measured, **given}
    _require(("nvme", "store"), known)
    machines = Machines(args.nodes, args.devices, **known)
    planned = plan(size_bytes, machines)
    document = {
        "model": args.name,
        "size_bytes": planned.size_bytes,
        "bucket_bytes": planned.bucket_bytes,
        "machines": asdict(machines),
        "measured": measured,
        "stages": [stage._asdict() for stage in planned.stages],
        "ready": [ready._asdict() for ready in planned.ready],
    }
    return present(args, document, _show)


def _require(rates: Sequence[str], known: Mapping[str, float]) -> None:
    """Raises CliError."""
    if missing := [f"--{rate}" for rate in rates if rate not in known]:
        how = "--measure finds --nvme, and of a NAME --store"
        raise CliError(
            f"model plan: {', '.join(missing)}: say it, or have it measured: {how}", exit_code=USAGE
        )


def _check(args: argparse.Namespace) -> None:
    """Raises CliError."""
    if bool(args.name) == bool(args.size):
        raise CliError("model plan: NAME or --size SIZE: one of them is needed", exit_code=USAGE)
    if args.size and (args.to or args.endpoint or args.region or args.regions):
        raise CliError("model plan: a bucket is for NAME: it does not go with --size", exit_code=USAGE)
    if args.directory is not None and not args.measure:
        raise CliError("model plan: --directory is for --measure", exit_code=USAGE)
    if args.measure and not args.nvme and args.directory is None:
        raise CliError("model plan: --measure needs --directory DIR, or --nvme RATE", exit_code=USAGE)


def _rate(option: str, text: str) -> float:
    try:
        rate = parse_rate(text)
    except ValueError as error:
        raise CliError(f"model plan: --{option} {text}: {error}", exit_code=USAGE) from error
    if not 1 <= rate <= RATE_MAX:
        raise CliError(f"model plan: --{option} {text}: allowed are 1B/s to 1000TB/s", exit_code=USAGE)
    return rate


def _asked(args: argparse.Namespace, given: dict[str, float]) -> tuple[dict[str, float], int]:
    """What was measured, and the bytes of the model."""
    measured = _measured(args, given) if args.measure else {}
    if args.size:
        return measured, size("model plan: --size", args.size, 1, 1024 * TIB)
    wants_store = args.measure and "store" not in given

    async def ask(objects: Objects) -> tuple[int, float]:
        from coldstart.fleet.rates import store_rate
        from coldstart.published.models import read

        manifest = await read(objects, args.name)
        return manifest.size_bytes, await store_rate(objects, manifest) if wants_store else 0.0

    size_bytes, rate = asked_of_bucket(args, ask)
    if rate:
        measured["store"] = rate * args.nodes  # as if others did not make it slower
    return measured, size_bytes


def _measured(args: argparse.Namespace, given: dict[str, float]) -> dict[str, float]:
    from coldstart.fleet.rates import memory_rate
    from kvstore.tools.doctor.disk_speed import NotMeasured, measure

    found = {} if "memory" in given else {"memory": memory_rate()}
    if "nvme" not in given:
        try:
            speed = measure(args.directory)
        except (NotMeasured, OSError) as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else FAILED
            why = getattr(error, "strerror", None) or error
            raise CliError(f"model plan: --directory {args.directory}: {why}", exit_code=code) from error
        found["nvme"] = min(speed.read_bytes_per_s, speed.write_bytes_per_s)
    return found


def _show(document: dict[str, Any]) -> None:
    nodes = document["machines"]["nodes"]
    for what, rate in document["measured"].items():
        alone = f" ({nodes} times what this node gets alone)" if what == "store" and nodes > 1 else ""
        print(f"measured: {what} {format_rate(rate)}{alone}")
    stages = [
        [
            stage["name"],
            Figure(format_duration(stage["seconds"])),
            Figure(format_rate(stage["rate"]) if stage["rate"] else NOTHING),
            stage["limit"],
        ]
        for stage in document["stages"]
    ]
    title = f"{document['model'] or 'a model'}, {format_bytes(document['size_bytes'])}: stages of a node"
    print_table(title, ("stage", "time", "rate", "limited by"), stages)
    ready = [
        [
            one["place"],
            "hit" if one["cache_hit"] else "miss",
            Figure(format_duration(one["seconds"])),
            one["bottleneck"],
        ]
        for one in document["ready"]
    ]
    columns = ("weights in", "compile cache", "time", "longest")
    print_table("until ready, by where the weights are", columns, ready)
    print(
        f"{plural(nodes, 'node')} without it: {format_bytes(document['bucket_bytes'])} read from the bucket"
    )
