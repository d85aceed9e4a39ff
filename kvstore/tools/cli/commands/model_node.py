"""`kvstore model VERB --node`: another node does it; what it answers is shown as here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.nodes import node_of, run_there
from kvstore.tools.cli.output import present

if TYPE_CHECKING:
    from kvstore.remote import Node, Operation

DONE = {
    "pin": "is pinned",
    "unpin": "is not pinned any more",
    "evict": "is not on its disk any more",
    "unload": "is not in DRAM any more",
}


def run_of_node(args: argparse.Namespace) -> int:
    command: str = args.called
    if args.verb in DONE:
        with node_of(args, command) as node:
            getattr(node, f"{args.verb}_model")(args.name)
        print(f"{args.name} {DONE[args.verb]}")
        return OK
    if args.verb in ("ls", "show"):
        return _read(args, command)
    return run_there(args, command, _beginning(args), _showing(args.verb))


def _read(args: argparse.Namespace, command: str) -> int:
    from kvstore.tools.cli.commands import model_local, model_ls, model_show

    if args.verb == "show":
        with node_of(args, command) as node:
            document = node.get_model(args.name)
        return present(args, document, model_show.show)
    if args.local and args.name:
        raise CliError(f"{command}: --local is of all models on a node", exit_code=USAGE)
    with node_of(args, command) as node:
        document = node.list_models(args.local, args.name)
    if args.local:
        return present(args, document, model_local.show)
    present(args, document, model_ls.show)
    return FAILED if any(row["problem"] for row in document["revisions"]) else OK


def _beginning(args: argparse.Namespace) -> Callable[[Node], Operation]:
    from kvstore.tools.cli.commands import model_gc

    begin: dict[str, Callable[[Node], Operation]] = {
        "publish": lambda node: node.publish_model(str(args.directory), args.name, args.revision, args.again),
        "rm": lambda node: node.remove_model(args.name, args.all, math.ceil(args.days)),
        "gc": lambda node: node.collect_models(args.dry_run, model_gc.grace_s(args)),
        "verify": lambda node: node.verify_model(args.name, args.deep),
        "preload": lambda node: node.preload_model(args.name, args.verify),
        "load": lambda node: node.load_model(args.name),
    }
    return begin[args.verb]


def _showing(verb: str) -> Callable[[dict[str, Any]], object]:
    from kvstore.tools.cli.commands import (
        model_dram,
        model_gc,
        model_preload,
        model_publish,
        model_rm,
        model_verify,
    )

    modules = {
        "publish": model_publish,
        "rm": model_rm,
        "gc": model_gc,
        "verify": model_verify,
        "preload": model_preload,
        "load": model_dram,
    }
    return modules[verb].show  # type: ignore[no-any-return]  # each of them has one
