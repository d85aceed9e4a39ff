"""Drop what this node's tiers (DRAM and NVMe) hold of a prefix, a namespace, a tenant, or everything.

  kvstore clear --tenant acme              every namespace of a tenant
  kvstore clear --namespace 3fa2           one namespace
  kvstore clear --prefix 6f66b1302f        the block with this hash and all that goes on behind it
  kvstore clear --all                      everything
  kvstore clear --all --dry-run            drop nothing, say what would be

On a terminal it says how much that is, and asks; elsewhere --yes is required. What is pinned stays: unpin it first.
What is in use stays if it is not given back within seconds.

Only this node is cleared. Nothing is deleted from the region's bucket: what is durable there is fetched again when it
is asked for. To have it erased everywhere: kvstore region erase.

Exit code 0 when all but pinned blocks left, 1 when something was in use or you said no, 2 for bad names, 3 when nothing
here has that name, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.asking import agreed, must_ask
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments
from kvstore.tools.cli.output import present
from kvstore.tools.cli.prefixes import ask, find_prefix, namespace_of, require_beginning, short, tenant_name
from kvstore.units import format_bytes, plural

if TYPE_CHECKING:
    from kvstore.client import Client

CLEAR_TIMEOUT_S = 600.0  # of one request: dropping takes turns with everything else

Scope = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what (one of them; --prefix may be together with --namespace)")
    what.add_argument("--tenant", type=tenant_name, metavar="NAME", help='of this tenant ("" for none)')
    what.add_argument("--namespace", default="", metavar="DIGEST", help="beginning of the namespace's digest")
    what.add_argument("--prefix", default="", metavar="HASH", help="beginning of a block's hash")
    what.add_argument("--all", action="store_true", help="everything")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="drop nothing, say what would be dropped")
    add_config_arguments(parser, "text", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    scope = _scope(args)
    asks = must_ask(args)
    scope["block_hash"] = ask(args, "clear", lambda client: _block_hash(client, args, scope["namespace"]))

    def clear(dry: bool) -> dict[str, Any]:
        answer: dict[str, Any] = ask(
            args, "clear", lambda client: client.clear(**scope, dry=dry), CLEAR_TIMEOUT_S
        )
        return answer

    if asks and not _agreed(clear(dry=True)):
        raise CliError("clear: nothing was cleared")
    return _say(args, clear(dry=args.dry_run))


def _block_hash(client: Client, args: argparse.Namespace, namespace: str) -> bytes:
    """Of the prefix, if one is named. A daemon that hangs is found out here, soon."""
    client.ping()
    return find_prefix(client, "clear", args.prefix, namespace) if args.prefix else b""


def _scope(args: argparse.Namespace) -> Scope:
    """What the daemon is asked to clear. Raises CliError."""
    if args.prefix:
        require_beginning("clear", args.prefix)
    given = (args.tenant is not None) + bool(args.namespace or args.prefix) + args.all
    if given != 1:
        raise CliError(
            f"clear: {'what?' if not given else 'too much is named:'} give one of --tenant, --namespace, --prefix, --all",
            exit_code=USAGE,
        )
    return {"namespace": namespace_of("clear", args), "tenant": args.tenant, "everything": args.all}


def _held(answer: dict[str, Any]) -> str:
    tiers = [
        f"{format_bytes(answer[f'{tier}_bytes'])} of {name}"
        for tier, name in (("dram", "DRAM"), ("nvme", "NVMe"))
        if answer[f"{tier}_bytes"]
    ]
    count = len(answer["namespaces"])
    which = f"namespace {short(answer['namespaces'])}" if count == 1 else plural(count, "namespace")
    return f"{plural(answer['blocks'], 'block')} of {which}{': ' if tiers else ''}{', '.join(tiers)}"


def _agreed(found: dict[str, Any]) -> bool:
    """Whether whoever sits there says yes."""
    stays = found["pinned_blocks"] + found["used_blocks"]
    kept = (
        f" ({plural(found['pinned_blocks'], 'pinned block')}, {found['used_blocks']:,} in use now)"
        if stays
        else ""
    )
    return agreed(f"This drops {_held(found)}{kept}. The region's bucket is not touched.", "Clear it?")


def _say(args: argparse.Namespace, answer: dict[str, Any]) -> int:
    is_whole = args.dry_run or not (answer["used_blocks"] or answer["rows_left"])
    present(args, {"dry_run": args.dry_run, **answer}, _print)
    return OK if is_whole else FAILED


def _print(answer: dict[str, Any]) -> None:
    if answer["dry_run"]:
        print(f"would clear {_held(answer)}")
    else:
        print(f"cleared {plural(answer['cleared_blocks'], 'block')}; there were {_held(answer)}")
    stays = "would stay" if answer["dry_run"] else "stay"
    if answer["pinned_blocks"]:
        print(f"{plural(answer['pinned_blocks'], 'pinned block')} {stays}; kvstore retention lists pins")
    if answer["used_blocks"]:
        print(
            f"{plural(answer['used_blocks'], 'block')} in use {stays}; clear again when engines are done with them"
        )
    if answer["rows_left"]:
        print(
            f"{plural(answer['rows_left'], 'row')} of NVMe are not cleared yet: they are when their disk answers; no restart finds them"
        )
