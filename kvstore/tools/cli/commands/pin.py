"""Keep a prefix from being evicted, now or when it comes, across restarts; or let it be evicted again.

  kvstore pin 5f0c…e1                     the prefix that ends with this block, wherever it is held
  kvstore pin 5f0c…e1 --namespace 3fa2    in this namespace, held already or not
  kvstore pin 6f66b1302f                  any unique beginning of the hash will do, as tables have it
  kvstore unpin 5f0c…e1                   wherever it is pinned; nothing leaves because of it

Pins may hold retention.pinned_share_max of each tier; a pin beyond that is refused. A TTL drops
pinned blocks, too. Exit code 1 when refused, 2 for a bad name, 3 when no such namespace is known, or
unpin finds no such pin.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvstore.tools.cli import OK
from kvstore.tools.cli.prefixes import (
    add_arguments_for,
    ask,
    confirm,
    find_prefix,
    namespace_of,
    require_beginning,
)

if TYPE_CHECKING:
    from kvstore.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments_for(parser, prefix="1")


def run(args: argparse.Namespace) -> int:
    command, pinned = args.called, args.called == "pin"
    require_beginning(command, args.prefix)
    namespace = namespace_of(command, args)

    def change(client: Client) -> tuple[bytes, list[str]]:
        block_hash = find_prefix(client, command, args.prefix, namespace)
        return block_hash, client.pin(block_hash, namespace, pinned)

    block_hash, namespaces = ask(args, command, change)
    facts: dict[str, object] = {"block_hash": block_hash.hex(), "pinned": pinned}
    confirm(args, f"{'pinned' if pinned else 'unpinned'} {block_hash.hex()}", facts, namespaces)
    return OK
