"""Have blocks dropped so long after they were stored; using them does not prolong it.

  kvstore ttl 24h --tenant acme           every namespace of a tenant
  kvstore ttl 7d --namespace 3fa2         one namespace; wins over its tenant's
  kvstore ttl 30min 5f0c…e1               a prefix and everything below it; the nearest one wins
  kvstore ttl never 5f0c…e1               … which is exempt from the others
  kvstore ttl off --tenant acme           remove that rule

TIME is a number of seconds, or one with s, min, h, d or w. From the first moment on expired blocks are
misses ("expired"). What is held already counts from when it was stored if that is known, else from now.
Exit code 2 for a bad time or name, 3 when there is no such namespace or rule.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvstore.constants import TTL_S_MAX
from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.options import duration
from kvstore.tools.cli.prefixes import (
    add_arguments_for,
    ask,
    confirm,
    find_prefix,
    namespace_of,
    require_beginning,
    subject,
    warn_of_tenant,
)
from kvstore.units import exact_duration

if TYPE_CHECKING:
    from kvstore.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("time", metavar="TIME", help='like "30min", "24h", "7d"; "never"; "off"')
    add_arguments_for(parser, prefix="?", tenant=True)


def run(args: argparse.Namespace) -> int:
    if args.tenant is not None and (args.prefix or args.namespace):
        raise CliError(
            "ttl: --tenant together with a prefix or --namespace: give one of them", exit_code=USAGE
        )
    if args.tenant is None and not args.prefix and not args.namespace:
        raise CliError("ttl: for what? Give a prefix, --namespace or --tenant", exit_code=USAGE)
    if args.prefix:
        require_beginning("ttl", args.prefix)
    ttl_s, is_set = None, args.time != "off"
    if args.time not in ("never", "off"):
        ttl_s = duration("ttl: time", args.time, 0.001, TTL_S_MAX, '; or "never", "off"')
    namespace = namespace_of("ttl", args)

    def change(client: Client) -> tuple[bytes, list[str]]:
        block_hash = find_prefix(client, "ttl", args.prefix, namespace) if args.prefix else b""
        whose = {"block_hash": block_hash, "namespace": namespace, "tenant": args.tenant}
        namespaces = client.set_ttl(ttl_s, is_set=is_set, **whose)
        if is_set:
            warn_of_tenant(client, "ttl", args.tenant)
        return block_hash, namespaces

    block_hash, namespaces = ask(args, "ttl", change)
    prefix = block_hash.hex()
    facts = {"block_hash": prefix or None, "tenant": args.tenant, "ttl_s": ttl_s, "set": is_set}
    rule = "never expires" if ttl_s is None else f"expires {exact_duration(ttl_s)} after it was stored"
    if not is_set:
        rule = "has no TTL of its own any more"
    confirm(args, f"{prefix or subject(args, namespaces)} {rule}", facts, namespaces)
    return OK
