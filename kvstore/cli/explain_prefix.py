"""`kvstore explain --prefix`: a prefix that is known by its hash alone, as reports show it; nobody needs its text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.cli import NOT_FOUND, CliError
from kvstore.cli.explain_asking import chosen, document_of
from kvstore.cli.prefixes import find_prefix, namespace_of

if TYPE_CHECKING:
    from kvstore.client import Client


def explain_prefix(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The document of `-o json`. Raises CliError, Unavailable, Refused."""
    selector = namespace_of("explain", args)
    block_hash = find_prefix(client, "explain", args.prefix, selector)
    chains = {digest.hex(): hashes for digest, hashes in client.chains(block_hash, selector)}
    if not chains:
        raise CliError(
            f"explain: prefix {args.prefix}: no tier of this node knows it (a bucket may have it all the same)",
            exit_code=NOT_FOUND,
        )
    spaces = chosen([space for space in client.list_namespaces() if space["digest"] in chains], args)
    size, hashes = len(block_hash), chains[spaces[0]["digest"]]
    fine = [hashes[start : start + size] for start in range(0, len(hashes), size)]
    # Namespaces of one engine share hashes where their blocks are of one size.
    alike = [space for space in spaces if chains[space["digest"]] == hashes]
    block_tokens = alike[0]["block_tokens"] or 1
    return document_of(client, alike, alike, fine, (block_tokens, block_tokens, len(fine) * block_tokens))
