"""Calls, described once for `Node` and `AsyncNode`: as generators of steps, which either of them takes in its way.

answer = yield Ask("CacheService/Pin", request)      a driver (kvstore/remote/node.py) asks, and sends the answer in, or
                                                     raises a NodeError there
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore.remote.errors import BadRequest, DeadlinePassed, Failed, NodeError, Unreachable, parsed
from kvstore.remote.places import ATTEMPTS_MAX, METHODS
from kvstore.remote.values import OperationState, Space, filled, plain

Hashes = bytes | Sequence[bytes]
SLOW_S: Final = 600.0  # of what reads every row, moves many records, drops many, or goes to buckets, one of which may hang
WATCH_S: Final = 300.0  # of one stream of what goes on; then it is begun anew
NAMESPACES_BYTES_MAX: Final = 64 << 20  # of all pages: they would go on for as long as a node likes
PAUSE_S: Final = 0.25  # before a stream that broke is begun anew; thrice as long each time


class Ask(NamedTuple):
    """One answer. method: "CacheService/Lookup"."""

    method: str
    request: Message
    timeout_s: float | None = None


class Open(NamedTuple):
    """Begin a stream; its messages are bytes. request: None where requests are a stream, too."""

    method: str
    request: Message | None
    timeout_s: float


class Write(NamedTuple):
    """The next request of the stream; None: there is none."""

    message: bytes | None


class Read(NamedTuple):
    """The next answer of the stream; None where it has ended."""


class Pause(NamedTuple):
    seconds: float


class Emit(NamedTuple):
    """Something for who iterates."""

    item: Any


Step = Ask | Open | Write | Read | Pause | Emit
Steps = Generator[Step, Any, Any]


class Walk:
    """Steps that are taken one by one. step: the next; None: that was all, and `returned` is what they return."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self.returned = steps, None
        self.step: Step | None = None
        self.go_on(None, None)

    def go_on(self, result: Any, failure: NodeError | None) -> None:
        """What became of the step. Raises what the steps do not take."""
        try:
            self.step = self._steps.throw(failure) if failure is not None else self._steps.send(result)
        except StopIteration as end:
            self.step, self.returned = None, end.value


class Patience:
    """How often a stream that broke is begun anew."""

    def __init__(self) -> None:
        self.failures = 0

    def after(self, error: NodeError) -> Pause:
        """Raises the error where that does not help, or was the last time."""
        self.failures += 1
        if not isinstance(error, Unreachable) or self.failures >= ATTEMPTS_MAX:
            raise error
        return Pause(PAUSE_S * 3 ** (self.failures - 1))


class Driver(Protocol):
    """A node, of either kind."""

    def answer(self, steps: Steps) -> Any:
        """Takes all of the steps; what they return."""

    def items(self, steps: Steps) -> Any:
        """Takes all of the steps; iterates over what they emit."""

    def begun(self, steps: Steps) -> Any:
        """As `answer`, of an operation: a handle of it."""


class Method:
    """A method of both kinds, by its steps. way: which of a driver's takes them."""

    def __init__(self, way: str, steps: Callable[..., Steps]) -> None:
        self._way, self._steps, self.__doc__ = way, steps, steps.__doc__

    def __get__(self, node: Driver | None, owner: type) -> Any:
        return self if node is None else partial(self._taken, getattr(node, self._way))

    def _taken(self, way: Callable[[Steps], Any], *values: Any, **fields: Any) -> Any:
        return way(self._steps(*values, **fields))


class Call(Method):
    """One that asks once. Its arguments are the fields of the request, in order or by name."""

    def __init__(self, method: str, timeout_s: float | None = None) -> None:
        begins = [field.name for field in METHODS[method].output_type.fields] == ["operation"]
        super().__init__("begun" if begins else "answer", self._asked)
        self._method, self._timeout_s = method, timeout_s
        self._names = [field.name for field in METHODS[method].input_type.fields]
        self.__doc__ = f"{method}: {', '.join(self._names) or 'no arguments'} (docs/grpc.md)."

    def _asked(self, *values: Any, **fields: Any) -> Steps:
        if len(values) > len(self._names) or fields.keys() & set(self._names[: len(values)]):
            raise BadRequest(f"{self._method}: allowed are, once: {', '.join(self._names)}", "FIELD")
        given = {**dict(zip(self._names, values, strict=False)), **fields}
        answer = plain((yield Ask(self._method, request_of(self._method, **given), self._timeout_s)))
        if answer is None and self._way == "begun":
            raise Failed(f"{self._method}: no operation was begun", "ANSWER")
        return answer


def request_of(method: str, **fields: Any) -> Message:
    """Raises BadRequest."""
    return filled(GetMessageClass(METHODS[method].input_type)(), fields)  # type: ignore[no-any-return]


def lookup(namespace: Space = "", hashes: Hashes = b"", **prompt: Any) -> Steps:
    """The longest prefix of a prompt that is held: a Lookup; a miss is one, too. In place of hashes: tokens, with cache_salt
    and hash_seed."""
    method = "CacheService/Lookup"
    return plain((yield Ask(method, request_of(method, namespace=namespace, **_prompt(hashes, **prompt)))))


def explain(namespace: Space = "", hashes: Hashes = b"", *, hash: bytes = b"", **prompt: Any) -> Steps:  # noqa: A002 the field's name
    """Block by block, what would become of a prompt. hash: of a prefix's last block, in place of a prompt."""
    method = "CacheService/Explain"
    what = {"hash": hash} if hash else _prompt(hashes, **prompt)
    return plain((yield Ask(method, request_of(method, namespace=namespace, **what))))


def _prompt(
    hashes: Hashes, tokens: Sequence[int] | None = None, cache_salt: str = "", hash_seed: str = ""
) -> dict[str, Any]:
    if tokens is None:
        return {"blocks": {"hashes": hashes}}
    return {"tokens": {"ids": tokens, "cache_salt": cache_salt, "hash_seed": hash_seed}}


def namespaces() -> Steps:
    """All that the node knows, in the order in which they came."""
    found: list[Any] = []
    left_bytes, method = NAMESPACES_BYTES_MAX, "CacheService/ListNamespaces"
    while True:
        page = yield Ask(method, request_of(method, skip=len(found)))
        left_bytes -= page.ByteSize()
        if left_bytes < 0:
            raise Failed(f"{method}: more than {NAMESPACES_BYTES_MAX} bytes of namespaces", "ANSWER")
        found += map(plain, page.namespaces)
        if not page.more or not page.namespaces:
            return found


def watch_figures(interval_s: float = 1.0) -> Steps:
    """What the node does, again and again: documents of `kvstore top`."""
    return _watched("ReportService/WatchFigures", lambda _: False, interval=interval_s)


def _watched(method: str, is_last: Callable[[Any], bool], **fields: Any) -> Steps:
    """Emits answers until the last, and returns that one. A stream that ends before is begun anew, unless it brought nothing for as
    long as it had."""
    patience, request = Patience(), request_of(method, **fields)
    answers = GetMessageClass(METHODS[method].output_type)
    while True:
        has_brought = False
        try:
            yield Open(method, request, WATCH_S)
            while (message := (yield Read())) is not None:
                patience, has_brought = Patience(), True
                answer = plain(parsed(answers, message))
                yield Emit(answer)
                if is_last(answer):
                    return answer
            yield patience.after(Unreachable(f"{method}: the stream ended"))
        except DeadlinePassed:
            if not has_brought:
                raise
        except NodeError as error:
            yield patience.after(error)


class Operation:
    """Work that goes on at a node. state: as it was heard of last. Of an AsyncNode, what a method returns is awaited."""

    def __init__(self, node: Driver, state: OperationState) -> None:
        self._node, self.state = node, state

    def watch(self) -> Any:
        """Iterates over its states: now and whenever it changes, until it has ended."""
        return self._node.items(self._watched())

    def result(self) -> Any:
        """Its document, once it has ended. Raises Failed where it did not end well."""
        return self._node.answer(self._result())

    def cancel(self) -> Any:
        """Stops it; its state then. What it has done stays."""
        return self._node.answer(self._cancel())

    def _watched(self) -> Steps:
        method = "NodeService/WatchOperation"
        self.state = yield from _watched(method, lambda state: state.is_over, id=self.state.id)
        return self.state

    def _result(self) -> Steps:
        state = yield from self._watched()
        if state.state != "done":
            raise Failed(state.problem or f"{state.method} {state.subject}: {state.state}", "OPERATION")
        return state.document

    def _cancel(self) -> Steps:
        method = "NodeService/CancelOperation"
        self.state = plain((yield Ask(method, request_of(method, id=self.state.id))))
        return self.state
