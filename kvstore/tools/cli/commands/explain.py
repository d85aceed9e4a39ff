"""Where a prompt would hit, block by block, and why not. Nothing is counted, nothing is loaded.

  kvstore explain --tokenizer DIR "text"     a prompt as text, as an engine's completion request has it
  kvstore explain --tokenizer DIR @file      the text is in a file; - reads it from stdin
  kvstore explain --tokens 1,2,3             token ids (also --tokens @file, --tokens -); needs no tokenizer
  kvstore explain --prefix 6f66b1302f        a stored prefix, by the beginning of the hash of its last block
  kvstore explain --engines [--model NAME]   which engines do not share what they store, and what separates them
  kvstore explain … --model NAME             of which model, where the daemon has several (or --namespace HEX)
  kvstore explain … --salt SALT              the request's cache_salt
  kvstore explain … -o json                  for programs, a row for each block; docs/cli.md lists the fields

A positional list of numbers (1,2,3 or [1, 2, 3]) is taken as token ids. Those of a chat request are what the engine's /tokenize
answers. Prompts with images or LoRA adapters are not covered.
Exit code 0 whether it would hit or not, 3 when there is no such namespace, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.protocol.outcomes import MEANINGS
from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.commands.explain_asking import answered, chosen, explain_prefix
from kvstore.tools.cli.commands.explain_engines import compare, print_comparison
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, is_of_node
from kvstore.tools.cli.output import Figure, present, print_table
from kvstore.tools.cli.prefixes import ask, find_prefix, namespace_of, require_beginning
from kvstore.units import count, printable
from tiers.reading import Unreadable, as_text, read_text

if TYPE_CHECKING:
    from kvstore.client import Client

PROMPT_BYTES_MAX = 64 << 20
TOKEN_MAX = (1 << 32) - 1
NUMBERS = re.compile(r"\s*\[?\s*\d+\s*([,\s]\s*\d+\s*)+\]?\s*", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "table", "json")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text, token ids, @FILE, or - for stdin")
    parser.add_argument(
        "--prefix", default="", metavar="HASH", help="in place of a text: beginning of a last block's hash"
    )
    parser.add_argument(
        "--engines", action="store_true", help="in place of a prompt: what separates engines of a model"
    )
    parser.add_argument("--tokens", metavar="IDS", help="token ids in place of a text: 1,2,3 or @FILE or -")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="MODEL",
        help="tokenizer.json, the model's directory, or its name where it is in the cache of Hugging Face",
    )
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="do not add what the tokenizer puts around a text"
    )
    parser.add_argument("--namespace", default="", metavar="HEX", help="its digest, or the beginning of it")
    parser.add_argument("--model", default="", metavar="NAME", help="the model's name, or a part of it")
    parser.add_argument("--tenant", metavar="NAME", help='the tenant ("" for none)')
    parser.add_argument("--salt", default="", help="cache_salt of the request")
    parser.add_argument("--hash-seed", metavar="SEED", help="PYTHONHASHSEED of the engine, where it is set")
    add_node_arguments(parser, "engines")


def run(args: argparse.Namespace) -> int:
    asked = (args.prompt, args.tokens, args.prefix or None, args.engines or None)
    if sum(word is not None for word in asked) != 1:
        raise CliError(
            "explain: give a PROMPT, --tokens, --prefix or --engines, one of them (see kvstore explain --help)",
            exit_code=USAGE,
        )
    args.namespace = namespace_of("explain", args)
    show = _print
    if is_of_node(args):
        document = _of_node(args)
    elif args.engines:
        document = ask(args, "explain", lambda client: compare(client, args))
        show = print_comparison
    elif args.prefix:
        require_beginning("explain", args.prefix)
        document = ask(args, "explain", lambda client: explain_prefix(client, args))
    else:
        tokens = _tokens(args)
        document = ask(args, "explain", lambda client: explain(client, tokens, args))
    return present(args, document, show)


def _of_node(args: argparse.Namespace) -> dict[str, Any]:
    from kvstore.tools.cli.nodes import Far, node_of

    if args.prefix:
        require_beginning("explain", args.prefix)
    tokens = None if args.prefix else _tokens(args)
    with node_of(args, "explain") as node:
        from kvstore.remote import Selector

        space = Selector(args.namespace, args.model, args.tenant)
        prompt: dict[str, Any] = {
            "tokens": tokens,
            "cache_salt": args.salt,
            "hash_seed": args.hash_seed or "",
        }
        if args.prefix:
            prompt = {"hash": find_prefix(Far(node), "explain", args.prefix, space.digest)}
        document: dict[str, Any] = node.explain(space, **prompt)
        return document


def explain(client: Client, tokens: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The document of `-o json`. Raises CliError, Unavailable, Refused."""
    from kvstore.ledger import prompts
    from kvstore.ledger.explain import Unclear

    spaces, seed = chosen(client.list_namespaces(), args), args.hash_seed
    seeds = prompts.SEEDS if seed is None else ()
    given = seed if seed is not None else os.environ.get("PYTHONHASHSEED")
    try:
        prompt = prompts.of_tokens(spaces, tokens, args.salt, [given, *seeds] if given is not None else seeds)
    except prompts.SeedUnknown as error:
        tried = (
            "the engine has a hash seed of its own"
            if seed is None
            else f"--hash-seed {seed} is not the engine's"
        )
        raise CliError(
            f"explain: {tried}: give the PYTHONHASHSEED of its process as --hash-seed{error}", exit_code=USAGE
        ) from error
    except Unclear as error:
        raise CliError(f"explain: {printable(str(error))}", exit_code=USAGE) from error
    return answered(client, prompt)


# -- the prompt --


def _tokens(args: argparse.Namespace) -> list[int]:
    """The token ids of what was asked. Raises CliError."""
    if args.tokens is not None:
        return _numbers(_read(args.tokens))
    text = _read(args.prompt)
    if NUMBERS.fullmatch(text):
        return _numbers(text)
    return _encoded(text, args.tokenizer, not args.no_special_tokens)


def _read(word: str) -> str:
    """The word itself, or what is in the file or on stdin that it names."""
    if word != "-" and not word.startswith("@"):
        return word
    if word == "-" and sys.stdin is None:
        raise CliError("explain: -: stdin is closed", exit_code=USAGE)
    try:
        if word != "-":
            return read_text(Path(word[1:]), PROMPT_BYTES_MAX, may_wait=True)
        content = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
        if len(content) > PROMPT_BYTES_MAX:
            raise CliError(f"explain: -: too large: allowed are {PROMPT_BYTES_MAX} bytes", exit_code=USAGE)
        return as_text(Path(word), content)
    except Unreadable as error:
        raise CliError(f"explain: {error}", exit_code=NOT_FOUND if error.is_missing else USAGE) from error


def _numbers(text: str) -> list[int]:
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    digits = len(str(TOKEN_MAX))
    wrong = next((w for w in words if not re.fullmatch(f"[0-9]{{1,{digits}}}", w) or int(w) > TOKEN_MAX), "")
    if wrong or not words:
        what = f"{wrong[:40]!r} is none" if wrong else "there are none"
        raise CliError(f"explain: token ids are whole numbers, like 1,2,3: {what}", exit_code=USAGE)
    return [int(word) for word in words]


def _encoded(text: str, path: Path | None, special: bool) -> list[int]:
    """The ids that a tokenizer makes of a text. Raises CliError."""
    if path is None:
        raise CliError(
            "explain: a text needs --tokenizer (tokenizer.json or the model's directory); or give --tokens 1,2,3",
            exit_code=USAGE,
        )
    path = place_of_model(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CliError(
            f"explain: --tokenizer {file}: no such file, and no model of that name in the cache of Hugging Face",
            exit_code=NOT_FOUND,
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CliError(
            "explain: a text needs the package tokenizers (pip install 'kvstore-llm[text]'); or give --tokens 1,2,3"
        ) from error
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=special).ids
    except Exception as error:
        raise CliError(f"explain: --tokenizer {file}: {error}", exit_code=USAGE) from error
    return ids


def place_of_model(path: Path) -> Path:
    """The directory of a model that is named as `vllm serve` takes it, where the cache of Hugging Face has it; else the path itself."""
    if path.exists() or path.is_absolute() or len(path.parts) > 2:
        return path
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{'--'.join(path.parts)}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return path
    found = cached / "snapshots" / Path(revision).name
    return found if found.is_dir() else path


# -- the table --


def _print(document: dict[str, Any]) -> None:
    parts = len(document["namespaces"])
    engine = f"model {document['model'] or '(no name)'}, tenant {document['tenant'] or '(none)'}"
    ranks = f", {parts} namespaces (KV groups) together" if parts > 1 else ""
    print(f"{printable(engine)}{ranks}, blocks of {document['block_tokens']} tokens\n")
    rows = [
        (
            _span(run["first_block"], run["last_block"]),
            _span(run["first_token"], run["last_token"]),
            Figure(count(run["tokens"])),
            run["outcome"],
            MEANINGS[run["outcome"]],
        )
        for run in document["runs"]
    ]
    if rows:
        print_table(
            "the prompt, from its beginning", ["blocks", "tokens", "count", "outcome", "what it means"], rows
        )
    print(document["summary"])


def _span(first: int, last: int) -> Figure:
    return Figure(first if first == last else f"{first}-{last}")
