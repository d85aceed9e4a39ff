"""`--node HOST:PORT`: the same command, of another node, over gRPC (docs/grpc.md).

question(client) ── `Far` has those methods of kvstore.client.Client that commands use ──▶ kvstore.remote.Node
long work        ── an operation there: its progress is shown, Control-C cancels it ─────▶ its document, printed as here
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, INTERRUPTED, NOT_FOUND, OK, UNREACHABLE, USAGE, CliError
from kvstore.tools.cli.options import node_files
from kvstore.tools.cli.output import present
from kvstore.tools.cli.streams import drawing
from kvstore.units import printable

if TYPE_CHECKING:
    from kvstore.remote import Node, Operation
    from kvstore.remote.values import OperationState

WHOLE_DIGITS = 64
Document = dict[str, Any]


@contextlib.contextmanager
def node_of(args: argparse.Namespace, command: str) -> Iterator[Node]:
    """The node that --node names. Raises CliError for whatever goes wrong with it meanwhile."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would write to our stderr
    try:
        from kvstore import remote
    except ImportError as error:
        raise CliError(f"{command}: --node: {error}") from error
    codes = {
        remote.Unreachable: UNREACHABLE,
        remote.DeadlinePassed: UNREACHABLE,
        remote.NotFound: NOT_FOUND,
        remote.BadRequest: USAGE,
    }
    try:
        with remote.Node(args.node, **node_files(args)) as node:
            yield node
    except remote.NodeError as error:
        why = str(error).removeprefix(f"{command}: ")  # as the command there says it
        raise CliError(f"{command}: {why}", exit_code=codes.get(type(error), FAILED)) from error


def asked_of_node(args: argparse.Namespace, command: str, question: Callable[[Any], Any]) -> Any:
    """As `ask`."""
    with node_of(args, command) as node:
        return question(Far(node))


class Far:
    """What commands ask a daemon, asked of another node's."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ping, self.status, self.retention = node.caller, node.status, node.rules
        self.change_setting = node.change_setting

    def settings(self, name: str) -> list[Document]:
        return self._node.settings(name)["settings"]  # type: ignore[no-any-return]

    def check(self) -> list[str]:
        return list(self._node.check())

    def find_prefixes(self, beginning: str, namespace: str = "") -> list[str]:
        if len(beginning) >= WHOLE_DIGITS and len(beginning) % 2 == 0:
            return [beginning]  # for those, too, who may not look for others
        scope = [namespace] if namespace else []
        return [one.hex() for one in self._node.find_prefixes(*scope, beginning=beginning)]

    def pin(self, block_hash: bytes, namespace: str = "", pinned: bool = True) -> list[str]:
        return list((self._node.pin if pinned else self._node.unpin)(namespace, block_hash))

    def set_ttl(self, ttl_s: float | None, *, is_set: bool = True, **scope: Any) -> list[str]:
        return list(self._node.set_ttl(_scope(**scope), (ttl_s or 0.0) if is_set else None))

    def set_quota(
        self, dram_bytes: int | None, nvme_bytes: int | None, *, namespace: str, tenant: str | None
    ) -> list[str]:
        sizes = [{None: -1, -1: None}.get(size, size) for size in (dram_bytes, nvme_bytes)]
        return list(self._node.set_quota(namespace, tenant, *sizes))

    def clear(self, *, everything: bool = False, dry: bool = False, **scope: Any) -> Document:
        where = None if everything else _scope(**scope)
        return self._node.erase(where, everything, dry)  # type: ignore[no-any-return]

    def list_namespaces(self) -> list[Document]:
        return [{"digest": one.digest.hex(), "fields": one.fields} for one in self._node.namespaces()]


def _scope(block_hash: bytes, namespace: str, tenant: str | None) -> Document:
    return {"hash": block_hash, "namespace": namespace or None, "tenant": tenant}


def run_there(
    args: argparse.Namespace,
    command: str,
    begin: Callable[[Node], Operation],
    show: Callable[[Document], object],
) -> int:
    """Have a node do it, and print what it brings as this machine does; the exit code. Raises CliError."""
    with node_of(args, command) as node:
        operation = begin(node)
        try:
            _follow(operation)
        except KeyboardInterrupt:
            operation.cancel()
            print(f"kvstore: {command}: cancelled; what is done stays", file=sys.stderr)
            return INTERRUPTED
        state = operation.state
    if state.state == "cancelled":
        raise CliError(f"{command}: it was cancelled")
    if state.document is None and state.problem:
        why = state.problem.removeprefix(f"{command}: ")  # as the command there says it
        raise CliError(f"{command}: {why}", exit_code=state.exit_code or FAILED)
    if state.document is not None:
        present(args, state.document, show)
    return state.exit_code if state.state != "done" else OK


def _follow(operation: Operation) -> None:
    """Until it has ended; its newest line is shown where stderr is a terminal."""
    if not sys.stderr.isatty():
        for _ in operation.watch():
            pass
        return
    from rich.console import Console
    from rich.text import Text

    def line_of(state: OperationState) -> Text:
        return Text(printable(state.progress or state.method))

    with Console(file=drawing(sys.stderr)).status(line_of(operation.state)) as line:
        for state in operation.watch():
            line.update(line_of(state))
