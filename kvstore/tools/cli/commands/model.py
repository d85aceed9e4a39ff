"""Models in a region's bucket, and on this node.

  kvstore model publish DIR --name NAME
  kvstore model ls                     which there are
  kvstore model show NAME[@REVISION]   one of them, with its files
  kvstore model verify [NAME] [--deep] whether the bucket has all of it
  kvstore model rm NAME@REVISION       take one away
  kvstore model gc                     give back the room of what no revision has
  kvstore model env NAME               the compile caches of an engine, restored before it starts
  kvstore model plan                   how long until one serves on new nodes, and what holds it back
  kvstore model volume                 JuiceFS volumes, for those who want files

On a node's disk:

  kvstore model preload NAME           have one there, verified
  kvstore model ls --local             which are there
  kvstore model path NAME              where: vllm serve "$(kvstore model path NAME)"
  kvstore model start NAME             the same at once, for an engine that begins before the weights are here
  kvstore model pin, unpin, evict NAME who stays and who leaves

In a node's DRAM:

  kvstore model load, unload NAME      bring it there, give its memory back to KV

`kvstore model VERB --node HOST:PORT` has another node do it. `kvstore model VERB --help` tells the options of each. The bucket is that of the node's own region, of --region NAME of the
file of regions, or any store: --to URL. docs/models.md says what is done, and what happens where it fails.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import Any

from kvstore.tools.cli import Parser
from kvstore.tools.cli.options import add_node_arguments, is_of_node

# Each is in the module kvstore.tools.cli.model_<verb>, or in one of TOGETHER, which is imported when it is used and has two functions:
#     add_verb_arguments(parser)      run_verb(args), which returns the exit code
VERBS = {
    "publish": "put a model into the bucket: a directory, or one in a cache of Hugging Face",
    "env": "restore the compile caches of an engine, and print what it needs in its environment",
    "ls": "which models and revisions there are",
    "show": "one revision: who published it, and its files",
    "verify": "whether the bucket has what its manifests name, and --deep, whether it is true",
    "rm": "take a revision away",
    "gc": "delete the chunks that no revision names",
    "preload": "have one on this node's disk",
    "path": "where it lies on this node, for an engine",
    "start": "have an engine start while it is on its way",
    "pin": "keep it on this node's disk",
    "unpin": "let a pinned one leave again",
    "evict": "take it off this node's disk",
    "load": "bring it into this node's DRAM",
    "unload": "give back the DRAM that it has",
    "plan": "how long until a model serves on new nodes, stage by stage, on paper",
    "volume": "JuiceFS volumes: format, mount, warmup, status, sync",
}
TOGETHER = {"path": "disk", "pin": "disk", "unpin": "disk", "evict": "disk", "load": "dram", "unload": "dram"}

# Those that another node does as well, and what goes not with that (kvstore/tools/cli/commands/model_node.py).
OF_NODES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ls", "show", "verify", "rm", "gc", "pin", "unpin", "evict", "load", "unload"), ()),
    "publish": ("by", "below", "with_cache", "tp", "pp", "path"),
    "preload": ("child",),
}


class VerbParser(Parser):
    """Of one verb, whose module is imported when its words are read."""

    _is_filled = False

    def fill(self) -> None:
        """Have all of its arguments. Idempotent."""
        if not self._is_filled:
            self._is_filled = True
            verb = self.prog.rpartition(" ")[2]
            module = module_of_verb(verb)
            self.description = module.__doc__
            module.add_verb_arguments(self)
            if verb in OF_NODES:
                self.set_defaults(called=f"model {verb}")
                add_node_arguments(self, "region", "to", "endpoint", *OF_NODES[verb])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; but what it does not know is refused here, where its options are known."""
        self.fill()
        found, left = super().parse_known_args(args, namespace)
        self.refuse(left)
        return found, left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=VerbParser)
    for verb, summary in VERBS.items():
        verbs.add_parser(
            verb, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )


def run(args: argparse.Namespace) -> int:
    if args.verb in OF_NODES and is_of_node(args):
        from kvstore.tools.cli.commands.model_node import run_of_node

        return run_of_node(args)
    return int(module_of_verb(args.verb).run_verb(args))


def module_of_verb(verb: str) -> ModuleType:
    return importlib.import_module(f"kvstore.tools.cli.commands.model_{TOGETHER.get(verb, verb)}")
