"""What a program elsewhere can do with a node: look a prompt up, have it brought into DRAM, watch a model's preload.

python -m examples.remote HOST:PORT --hashes HEX,HEX,… [--model NAME] [--preload NAME[@REVISION]]

The node serves gRPC (grpc.listen, docs/grpc.md). Certificates, where it is another machine: --ca, --cert, --key; a token:
--token-file. The hashes are those of a prompt's blocks, from the first on; with --tokens 1,2,3 the node makes them.
"""

from __future__ import annotations

import argparse
import sys

from kvstore.remote import Lookup, Node, NodeError, OperationState, Selector
from kvstore.units import format_bytes, format_duration


def main(words: list[str] | None = None) -> int:
    args = _parsed(words)
    try:
        with Node(
            args.node, ca=args.ca, certificate=args.cert, key=args.key, token_file=args.token_file
        ) as node:
            print(f"{args.node} knows us as {node.caller().name}")
            if args.hashes or args.tokens:
                look_up(node, args)
            if args.preload:
                preload(node, args.preload)
    except NodeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def look_up(node: Node, args: argparse.Namespace) -> None:
    """What of the prompt is held where; and has what is in slower tiers brought into DRAM."""
    space = Selector(model=args.model)
    found: Lookup = node.lookup(space, args.hashes or b"", tokens=args.tokens)
    took = format_duration(found.predicted_load_s)
    print(
        f"{found.held_blocks} of {found.blocks} blocks held, {format_bytes(found.held_bytes)}, loaded in {took}"
    )
    for run in found.runs:
        print(f"  {run.blocks} blocks: {run.tier or 'in no tier'} ({run.outcome})")
    if any(run.tier not in ("", "dram") for run in found.runs):
        hashes: bytes = found.hashes or b"".join(args.hashes)
        size = len(hashes) // found.blocks
        print(f"{node.prefetch(space, hashes[: found.held_blocks * size])} blocks on their way into DRAM")


def preload(node: Node, model: str) -> None:
    """On the node's disk; what it says meanwhile. Control-C has the node stop."""
    operation = node.preload_model(model)
    state: OperationState
    try:
        for state in operation.watch():
            print(f"{state.state}: {state.progress or state.subject}")
    except KeyboardInterrupt:
        operation.cancel()
        raise
    print(f"{model} is in {operation.result()['path']}")


def _parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.remote")
    parser.add_argument("node", metavar="HOST:PORT")
    parser.add_argument("--hashes", type=lambda text: [bytes.fromhex(one) for one in text.split(",")])
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--model", default="")
    parser.add_argument("--preload", default="")
    for name in ("ca", "cert", "key", "token-file"):
        parser.add_argument(f"--{name}")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
