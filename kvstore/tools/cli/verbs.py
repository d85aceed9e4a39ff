"""Commands that have verbs, `kvstore region status`: a module for each verb, imported when it is used.

kvstore region status ─▶ kvstore.tools.cli.commands.region_status ─▶ add_verb_arguments(parser), run_verb(args)
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from kvstore.tools.cli import Parser
from kvstore.tools.cli.options import add_node_arguments


class Verbs(NamedTuple):
    """command: whose. summaries: of each, in the order in which they are shown. together: of those that share a module, the end of
    its name. of_nodes: those that another node does as well, and what does not go with --node."""

    command: str
    summaries: Mapping[str, str]
    together: Mapping[str, str] = {}
    of_nodes: Mapping[str, tuple[str, ...]] = {}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """What `add_arguments` of the command does."""
        of_ours: type[_VerbParser] = type("_", (_VerbParser,), {"verbs": self})
        parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=of_ours)
        for verb, summary in self.summaries.items():
            parsers.add_parser(
                verb, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
            )

    def module(self, verb: str) -> ModuleType:
        name = f"{self.command}_{self.together.get(verb, verb)}"
        return importlib.import_module(f"kvstore.tools.cli.commands.{name}")

    def run(self, args: argparse.Namespace) -> int:
        """What `run` of the command does."""
        return int(self.module(args.verb).run_verb(args))


class _VerbParser(Parser):
    """Of one verb, whose module is imported when its words are read."""

    verbs: Verbs
    _is_filled = False

    def fill(self) -> None:
        """Have all of its arguments. Idempotent."""
        if not self._is_filled:
            self._is_filled = True
            verb = self.prog.rpartition(" ")[2]
            module = self.verbs.module(verb)
            self.description = module.__doc__
            self.set_defaults(called=f"{self.verbs.command} {verb}", verb=verb)
            module.add_verb_arguments(self)
            if verb in self.verbs.of_nodes:
                add_node_arguments(self, *self.verbs.of_nodes[verb])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        return super().parse_known_args(args, namespace)
