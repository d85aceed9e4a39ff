"""Warm a region: copy what is missing there, and preload its most valuable prefixes into the tiers of its daemons.

  kvstore warm eu --regions regions.toml                  everything that is durable, into DRAM, as far as there is room
  kvstore warm eu --dry-run                               only say what it would take, and bring
  kvstore warm eu --model 'llama*' --budget 200GiB        the best 200 GiB of some models, on each daemon
  kvstore warm eu --to nvme                               onto NVMe: through DRAM, where nothing stays of it
  kvstore warm eu --weights qwen3-8b                      a published model, NAME or NAME@REVISION: copied to the region if it lacks
                                                          there, and onto the disks of daemons that preload models
  kvstore warm eu --cancel                                take the order back that was given with these words

The order lies in the region's bucket, and so does its progress: nothing else has to be reached from here. Daemons take it
within a quarter of a minute, and so do those that start while it is in force. Mirrors of the region copy first what it names.
Ordering the same again is looking at it. Control-C leaves it running.

Serving goes first, and nothing that a daemon holds leaves for it: what finds no free room in the tier is not loaded.

Exit code 0 when all daemons are done, or have no room for more; 1 when none took it, one stopped, or something could not be had; 2 for
wrong words, 3 when nothing has such a name or there is no such order to cancel, 4 when a bucket does not answer. Prefixes that you name, into
this node: kvstore prefetch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.constants import DAY_S, NVME_CAPACITY_BYTES_MAX
from kvstore.tools.cli import FAILED, INTERRUPTED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.buckets import asked, opened
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import (
    add_config_arguments,
    add_node_arguments,
    duration,
    is_of_node,
    load_config,
    model_name,
    size,
)
from kvstore.tools.cli.output import Figure, present, print_json, print_table, progress_bars, say
from kvstore.units import NOTHING, format_bytes, format_duration, money, percent, plural

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from kvstore.tools.cli.commands.warm_plan import Plan
    from replication.formats.orders import Order
    from tiers.bucket.objects import Objects

LIFE_S_MIN, LIFE_S_MAX = 60.0, 30 * DAY_S
WAIT_S_MAX = DAY_S
NAME_CHARS_MAX = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("region", metavar="REGION", help="a region of the file")
    for name in ("model", "tenant"):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"only this {name}; * and ? are allowed; may be given several times",
        )
    parser.add_argument(
        "--weights",
        action="append",
        default=[],
        type=model_name,
        metavar="NAME",
        help="weights of a published model, NAME or NAME@REVISION, and no KV; may be given several times",
    )
    parser.add_argument(
        "--budget", default="", metavar="SIZE", help="at most so much, on each daemon (default: what fits)"
    )
    parser.add_argument("--to", choices=("dram", "nvme"), help="the tier (default dram; of --weights: nvme)")
    parser.add_argument(
        "--for", dest="life", metavar="TIME", help="how long the order is in force (default 1d)"
    )
    parser.add_argument(
        "--wait", metavar="TIME", help="for a daemon to take it; 0: order it, and do not look (default 60s)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--dry-run", action="store_true", help="say what it takes, and order nothing")
    action.add_argument("--cancel", action="store_true", help="take the order back")
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_of_node(args):
        return _of_node(args)
    args.to = args.to or ("nvme" if args.weights else "dram")
    order = _order(args)
    wait_s = duration("warm: --wait", "60s" if args.wait is None else args.wait, 0.0, WAIT_S_MAX)
    deployment = load_deployment(args)
    place = deployment.place(args.region, "warm")
    if args.cancel:
        return _cancel(args, order)
    order = asked(lambda: _dated(deployment, args.region, order))
    made_s, plan = order.made_s, _plan(args, order)
    facts: dict[str, Any] = {"region": args.region, "order": _order_facts(order), "plan": vars(plan)}
    if args.output == "table":
        _show_plan(args, plan)
    if not args.dry_run:
        facts["order"] = _order_facts(order := asked(lambda: _put(place.open(), order)))
    if args.dry_run or not wait_s:
        state = "planned" if args.dry_run else "ordered"
        if args.output == "json":
            print_json({**facts, "state": state, "daemons": [], "mirrors": []})
        elif not args.dry_run:
            _show_ordered(order.id)
        return OK
    return _watch(args, place.open(), order, plan, (wait_s, max(0.0, made_s - order.made_s)), facts)


def _of_node(args: argparse.Namespace) -> int:
    """Ordered by another node, of its regions."""
    from kvstore.tools.cli.commands.warm_plan import Plan
    from kvstore.tools.cli.nodes import node_of, run_there

    wait_s = None if args.wait is None else duration("warm: --wait", args.wait, 0.0, WAIT_S_MAX)
    warming = {
        "region": args.region,
        "models": args.model,
        "tenants": args.tenant,
        "weights": args.weights,
        "budget_bytes": size("warm: --budget", args.budget, 1, NVME_CAPACITY_BYTES_MAX) if args.budget else 0,
        "to": args.to,
        "in_force": None if args.life is None else duration("warm: --for", args.life, LIFE_S_MIN, LIFE_S_MAX),
    }
    if not args.dry_run and not args.cancel:
        return run_there(args, "warm", lambda node: node.warm_region(warming, wait_s), _show_all(args))
    with node_of(args, "warm") as node:
        document = (node.plan_warming if args.dry_run else node.cancel_warming)(warming)
    if args.cancel:
        return present(args, document, _show_cancelled)
    return present(args, document, lambda facts: _show_plan(args, Plan(**facts["plan"])))


def _show_all(args: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """Of an order that another node gave."""
    from kvstore.tools.cli.commands.warm_plan import Plan

    def show(facts: dict[str, Any]) -> None:
        _show_plan(args, Plan(**facts["plan"]))
        if facts["state"] == "ordered":
            _show_ordered(facts["order"]["id"])
        else:
            _show_watched(args.region, facts)

    return show


def _watch(
    args: argparse.Namespace,
    objects: Objects,
    order: Order,
    plan: Plan,
    times_s: tuple[float, float],
    facts: dict[str, Any],
) -> int:
    """times_s: how long to wait for daemons, and how old the order is."""
    from kvstore.tools.cli.commands.warm_watch import watch

    try:
        with progress_bars(of_bytes=True) as show:
            watched = asked(lambda: watch(objects, order, plan.daemons, *times_s, show))
    except KeyboardInterrupt:
        print(
            f"kvstore: order {order.id} goes on; the same words show how far it is, --cancel takes it back",
            file=sys.stderr,
        )
        return INTERRUPTED
    present(args, {**facts, **watched.facts()}, lambda all_facts: _show_watched(args.region, all_facts))
    return OK if watched.state == "done" else FAILED


# -- what is asked for --


def _order(args: argparse.Namespace) -> Order:
    """In force from 0 on."""
    from replication.formats.orders import Order

    for option, names in (("--model", args.model), ("--tenant", args.tenant)):
        for name in names:
            if not 0 < len(name) <= NAME_CHARS_MAX:
                raise CliError(
                    f"warm: {option}: {len(name)} characters: allowed are 1 to {NAME_CHARS_MAX}",
                    exit_code=USAGE,
                )
    _check_weights(args)
    budget_bytes = size("warm: --budget", args.budget, 1, NVME_CAPACITY_BYTES_MAX) if args.budget else 0
    life_s = duration("warm: --for", "1d" if args.life is None else args.life, LIFE_S_MIN, LIFE_S_MAX)
    return Order(
        models=tuple(sorted(set(args.model))),
        tenants=tuple(sorted(set(args.tenant))),
        budget_bytes=budget_bytes,
        to=args.to,
        made_s=0.0,
        until_s=life_s,
        weights=tuple(sorted(set(args.weights))),
    )


async def _dated(deployment: Deployment, region: str, order: Order) -> Order:
    """In force from now on, by the clock of the store."""
    from msgspec.structs import replace

    from replication.formats.keeping import clock_of

    now_s = (await clock_of(await opened(deployment, region)))()
    return replace(order, made_s=now_s, until_s=now_s + order.until_s)


def _check_weights(args: argparse.Namespace) -> None:
    """Raises CliError."""
    others = {"--model": args.model, "--tenant": args.tenant, "--budget": args.budget}
    given = [option for option, value in others.items() if value]
    if args.weights and (given or args.to != "nvme"):
        other = given[0] if given else f"--to {args.to}"
        raise CliError(f"warm: {other} is for KV: it does not go with --weights", exit_code=USAGE)


def _plan(args: argparse.Namespace, order: Order) -> Plan:
    from kvstore.tools.cli.commands.warm_plan import NothingNamed, Planner
    from kvstore.tools.cli.commands.warm_weights import plan_weights

    deployment, prices = load_deployment(args), load_config(args).config.durable

    async def planned() -> Plan:
        try:
            if order.weights:
                return await plan_weights(deployment, args.region, order, prices)
            return await Planner(deployment, args.region, order, prices).plan()
        except NothingNamed as error:
            raise CliError(f"warm: {error}", exit_code=NOT_FOUND) from error

    return asked(planned)


async def _put(objects: Objects, order: Order) -> Order:
    from replication.constants import ORDERS_MAX
    from replication.formats.orders import clear_over, put_order, read_orders

    await clear_over(objects, order.made_s)
    others = [one for one in (await read_orders(objects, {})).by_key.values() if one.id != order.id]
    if len(others) >= ORDERS_MAX:
        raise CliError(f"warm: {len(others)} orders are in force: allowed are {ORDERS_MAX}; cancel some")
    return await put_order(objects, order)


def _cancel(args: argparse.Namespace, order: Order) -> int:
    from replication.formats.orders import cancel_order, read_orders

    deployment = load_deployment(args)

    async def cancel() -> list[Order]:
        objects = await opened(deployment, args.region)
        if await cancel_order(objects, order.id):
            return []
        there = list((await read_orders(objects, {})).by_key.values())
        known = "; ".join(_words(one) for one in there)
        raise CliError(
            f"warm {args.region} --cancel: no such order: "
            + (f"in force are: {known}" if known else "none is in force"),
            exit_code=NOT_FOUND,
        )

    asked(cancel)
    document = {"region": args.region, "order": _order_facts(order), "state": "cancelled"}
    return present(args, document, _show_cancelled)


def _words(order: Order) -> str:
    """An order, as it is given."""
    words = [f"--model {name}" for name in order.models] + [f"--tenant {name}" for name in order.tenants]
    words += [f"--weights {name}" for name in order.weights]
    budget = [f"--budget {order.budget_bytes}"] if order.budget_bytes else []
    return " ".join([*words, *budget, f"--to {order.to}"])


# -- what is shown --


def _order_facts(order: Order) -> dict[str, Any]:
    return {
        "id": order.id,
        "models": list(order.models),
        "weights": list(order.weights),
        "tenants": list(order.tenants),
        "budget_bytes": order.budget_bytes,
        "to": order.to,
        "until_s": order.until_s,
    }


def _show_plan(args: argparse.Namespace, plan: Plan) -> None:
    currency = load_config(args).config.report.currency

    def taking(seconds: float | None) -> str:
        return "not known before it runs" if seconds is None else format_duration(seconds)

    price = plan.copy_price + plan.put_price
    told = f"by the traffic of {', '.join(plan.traffic_of)}" if plan.traffic_of else "no traffic is known"
    thing = "model" if args.weights else "pack"
    rows: list[Sequence[object]] = [
        ["copied by mirrors", Figure(format_bytes(plan.copy_bytes)), plural(plan.copy_packs, thing)],
        ["… takes", Figure(taking(plan.copy_s)), ""],
        [
            "… costs",
            Figure(money(price, currency)),
            f"and {money(plan.storage_month_price, currency)} a month",
        ],
        [
            "preloaded, each daemon",
            Figure(format_bytes(plan.preload_bytes)),
            "" if args.weights else _of(plan),
        ],
        ["… takes", Figure(taking(plan.preload_s)), f"seen lately: {plural(len(plan.daemons), 'daemon')}"],
    ]
    if not args.weights:
        rows += [
            ["expected hit rate", Figure(_rate(plan.hit_rate)), told],
            ["… without the bucket", Figure(_rate(plan.preloaded_hit_rate)), "at least"],
        ]
    print_table(f"warming {args.region}", ["", "", ""], rows)
    for note in plan.notes:
        say(f"  {note}", 4)


def _of(plan: Plan) -> str:
    blocks = f"{plural(plan.preload_packs, 'pack')}, {plural(plan.preload_blocks, 'block')}"
    return f"{blocks}, of {format_bytes(plan.durable_bytes)} durable"


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else percent(rate)


def _show_cancelled(document: dict[str, Any]) -> None:
    say(f"order {document['order']['id']} is cancelled; what is loaded stays")


def _show_ordered(identity: str) -> None:
    say(f"order {identity} is in force; the same words again show how far it is")


def _show_watched(region: str, facts: dict[str, Any]) -> None:
    rows = [
        [
            one["who"],
            one["state"],
            Figure(format_bytes(one["done_bytes"])),
            Figure(format_bytes(one["total_bytes"])),
            Figure(f"{format_bytes(one['bytes_per_s'])}/s" if one["bytes_per_s"] else NOTHING),
            one["problem"],
        ]
        for one in (*facts["mirrors"], *facts["daemons"])
    ]
    if rows:
        print_table(f"warming {region}", ["who", "state", "done", "of", "rate", ""], rows, drop=("rate",))
    if facts["state"] == "not taken":
        print(
            "no daemon of the region has taken the order; it stays in force, and is taken by those that start"
        )
