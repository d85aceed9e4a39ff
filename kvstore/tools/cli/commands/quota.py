"""How many bytes a namespace or a tenant may hold on this node, tier by tier.

  kvstore quota --tenant acme --dram 8GiB --nvme 200GiB
  kvstore quota --tenant acme --nvme 300GiB       DRAM as before
  kvstore quota --tenant acme --dram none         no limit there any more
  kvstore quota --namespace 3fa2 --dram 1GiB

At its quota a new block displaces the coldest ones of the same tenant or namespace; if none may
leave it is refused. Both are misses later ("over_quota"). Lowered, it is reached within seconds.
Exit code 2 for a bad size or name, 3 when there is no such namespace.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvstore.constants import AS_IT_IS, NVME_CAPACITY_BYTES_MAX
from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.options import size
from kvstore.tools.cli.prefixes import add_arguments_for, ask, confirm, namespace_of, subject, warn_of_tenant
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from kvstore.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments_for(parser, tenant=True)
    for tier in ("dram", "nvme"):
        parser.add_argument(f"--{tier}", metavar="SIZE", help='like "8GiB"; "none" or "off": no limit')


def run(args: argparse.Namespace) -> int:
    if args.dram is None and args.nvme is None:
        raise CliError(
            "quota: nothing to set: give --dram, --nvme, or both (kvstore retention lists quotas)",
            exit_code=USAGE,
        )
    if (args.tenant is not None) == bool(args.namespace):
        raise CliError("quota: give --tenant or --namespace, one of them", exit_code=USAGE)
    namespace = namespace_of("quota", args)
    dram_bytes, nvme_bytes = (_size(name, getattr(args, name)) for name in ("dram", "nvme"))

    def change(client: Client) -> list[str]:
        namespaces = client.set_quota(dram_bytes, nvme_bytes, namespace=namespace, tenant=args.tenant)
        warn_of_tenant(client, "quota", args.tenant)
        return namespaces

    namespaces = ask(args, "quota", change)
    sizes = {"dram": dram_bytes, "nvme": nvme_bytes}
    given = {name: limit for name, limit in sizes.items() if limit != AS_IT_IS}
    limits = ", ".join(f"{name} {'no limit' if n is None else format_bytes(n)}" for name, n in given.items())
    facts = {"tenant": args.tenant, **{f"{name}_bytes": limit for name, limit in given.items()}}
    confirm(args, f"{subject(args, namespaces)}: {limits}", facts, namespaces)
    return OK


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return AS_IT_IS
    if text in ("none", "off"):
        return None
    return size(f"quota: --{option}", text, 0, NVME_CAPACITY_BYTES_MAX, '; or "none"')
