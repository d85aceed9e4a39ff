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

from kvstore.cli import OK, USAGE, CliError
from kvstore.cli.prefixes import (
    add_common_arguments,
    add_namespace_argument,
    add_prefix_argument,
    add_tenant_argument,
    ask,
    confirm,
    namespace_of,
    prefix_hash,
    subject,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("time", metavar="TIME", help='like "30min", "24h", "7d"; "never"; "off"')
    add_prefix_argument(parser, is_required=False)
    add_namespace_argument(parser)
    add_tenant_argument(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from kvstore.durations import short_duration

    if args.tenant is not None and (args.prefix or args.namespace):
        raise CliError(
            "ttl: --tenant together with a prefix or --namespace: give one of them", exit_code=USAGE
        )
    if args.tenant is None and not args.prefix and not args.namespace:
        raise CliError("ttl: for what? Give a prefix, --namespace or --tenant", exit_code=USAGE)
    block_hash = prefix_hash("ttl", args.prefix) if args.prefix else b""
    namespace, ttl_s, is_set = namespace_of("ttl", args), _seconds(args.time), args.time != "off"
    namespaces = ask(
        args,
        "ttl",
        lambda client: client.set_ttl(
            ttl_s, block_hash=block_hash, namespace=namespace, tenant=args.tenant, is_set=is_set
        ),
    )
    facts = {
        "block_hash": block_hash.hex() or None,
        "tenant": args.tenant,
        "ttl_s": ttl_s,
        "set": is_set,
    }
    told = "never expires" if ttl_s is None else f"expires {short_duration(ttl_s)} after it was stored"
    if not is_set:
        told = "has no TTL of its own any more"
    confirm(args, f"{block_hash.hex() or subject(args, namespaces)} {told}", facts, namespaces)
    return OK


def _seconds(text: str) -> float | None:
    from kvstore.constants import TTL_S_MAX
    from kvstore.durations import parse_duration, short_duration

    if text in ("never", "off"):
        return None
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise CliError(f'ttl: time {text}: {error}; or "never", "off"', exit_code=USAGE) from error
    if not 0 < seconds <= TTL_S_MAX:
        most = short_duration(TTL_S_MAX)
        raise CliError(f"ttl: time {text}: allowed are more than 0 and at most {most}", exit_code=USAGE)
    return seconds
