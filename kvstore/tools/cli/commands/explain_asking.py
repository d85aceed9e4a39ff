"""Asking the daemon what would become of blocks, and the document that `kvstore explain` makes of its answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.prefixes import find_prefix
from kvstore.units import printable

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.ledger import prompts
    from kvstore.ledger.explain import Space


def chosen(known: Sequence[Space], args: argparse.Namespace) -> list[Space]:
    """The namespaces of the one engine that is meant. Raises CliError."""
    from kvstore.ledger import explain

    try:
        return explain.choose(known, args.namespace, args.model, args.tenant)
    except explain.Unclear as error:
        code = NOT_FOUND if isinstance(error, explain.NoneSuch) else USAGE
        raise CliError(f"explain: {printable(str(error))}", exit_code=code) from error


def explain_prefix(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The document of `-o json` for a prefix that is known by its hash alone, as reports show it. Raises CliError, Unavailable, Refused."""
    from kvstore.ledger import prompts

    block_hash = find_prefix(client, "explain", args.prefix, args.namespace)
    chains = {digest.hex(): hashes for digest, hashes in client.chains(block_hash, args.namespace)}
    if not chains:
        raise CliError(
            f"explain: prefix {args.prefix}: no tier of this node knows it (a bucket may have it all the same)",
            exit_code=NOT_FOUND,
        )
    spaces = chosen([space for space in client.list_namespaces() if space["digest"] in chains], args)
    return answered(client, prompts.of_chains(spaces, chains))


def answered(client: Client, prompt: prompts.Prompt) -> dict[str, Any]:
    """The document of `-o json`. Raises Unavailable, Refused."""
    from kvstore.ledger import prompts

    asked = prompts.questions(prompt)
    return prompts.document(prompt, asked, [client.explain(q.digests, q.hashes) for q in asked])
