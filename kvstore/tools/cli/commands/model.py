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

from kvstore.tools.cli.options import is_of_node
from kvstore.tools.cli.verbs import Verbs

SUMMARIES = {
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
_NOT_OF_NODES = ("region", "to", "endpoint")
VERBS = Verbs(
    "model",
    SUMMARIES,
    together={
        "path": "disk",
        "pin": "disk",
        "unpin": "disk",
        "evict": "disk",
        "load": "dram",
        "unload": "dram",
    },
    of_nodes={
        **dict.fromkeys(
            ("ls", "show", "verify", "rm", "gc", "pin", "unpin", "evict", "load", "unload"), _NOT_OF_NODES
        ),
        "publish": (*_NOT_OF_NODES, "by", "below", "with_cache", "tp", "pp", "path"),
        "preload": (*_NOT_OF_NODES, "child"),
    },
)  # what they are of a node: kvstore/tools/cli/commands/model_node.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    VERBS.add_to(parser)


def run(args: argparse.Namespace) -> int:
    if args.verb in VERBS.of_nodes and is_of_node(args):
        from kvstore.tools.cli.commands.model_node import run_of_node

        return run_of_node(args)
    return VERBS.run(args)
