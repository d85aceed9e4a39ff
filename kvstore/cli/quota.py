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

from kvstore.cli import OK, USAGE, CliError
from kvstore.cli.prefixes import (
    add_common_arguments,
    add_namespace_argument,
    add_tenant_argument,
    ask,
    confirm,
    namespace_of,
    subject,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_namespace_argument(parser)
    add_tenant_argument(parser)
    for tier in ("dram", "nvme"):
        parser.add_argument(f"--{tier}", metavar="SIZE", help='like "8GiB"; "none": no limit')
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from kvstore.constants import AS_IT_IS
    from kvstore.sizes import short_size

    if args.dram is None and args.nvme is None:
        raise CliError("quota: nothing to set: give --dram, --nvme, or both", exit_code=USAGE)
    if (args.tenant is not None) == bool(args.namespace):
        raise CliError("quota: give --tenant or --namespace, one of them", exit_code=USAGE)
    namespace = namespace_of("quota", args)
    dram_bytes, nvme_bytes = (_size(name, getattr(args, name)) for name in ("dram", "nvme"))
    namespaces = ask(
        args,
        "quota",
        lambda client: client.set_quota(dram_bytes, nvme_bytes, namespace=namespace, tenant=args.tenant),
    )
    sizes = {"dram": dram_bytes, "nvme": nvme_bytes}
    given = {name: size for name, size in sizes.items() if size != AS_IT_IS}
    told = ", ".join(f"{name} {'no limit' if n is None else short_size(n)}" for name, n in given.items())
    facts = {"tenant": args.tenant, **{f"{name}_bytes": size for name, size in given.items()}}
    confirm(args, f"{subject(args, namespaces)}: {told}", facts, namespaces)
    return OK


def _size(option: str, text: str | None) -> int | None:
    from kvstore.constants import AS_IT_IS, NVME_CAPACITY_BYTES_MAX
    from kvstore.sizes import exact_size, parse_size

    if text is None:
        return AS_IT_IS
    if text == "none":
        return None
    try:
        size = parse_size(text)
    except ValueError as error:
        raise CliError(f'quota: --{option} {text}: {error}; or "none"', exit_code=USAGE) from error
    if size > NVME_CAPACITY_BYTES_MAX:
        most = exact_size(NVME_CAPACITY_BYTES_MAX)
        raise CliError(f"quota: --{option} {text}: at most {most} are allowed", exit_code=USAGE)
    return size
