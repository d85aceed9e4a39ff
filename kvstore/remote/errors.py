"""What a call of another node may raise: a class for each case, all of them NodeError.

`reason` is the node's word, as docs/grpc.md lists them: "UNKNOWN_NAMESPACE"; `retry_after_s` when to ask again, where it said so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvstore.errors import KvstoreError


class NodeError(KvstoreError):
    """Any failure of a call."""

    def __init__(self, message: str, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class Unreachable(NodeError):
    """Nobody answers there, or the handshake failed; what may be repeated was."""


class DeadlinePassed(NodeError):
    """No answer in time."""


class NotKnown(NodeError):
    """The node does not know who asks: no certificate or token, or one that it does not take."""


class NotAllowed(NodeError):
    """Who asks has no right to that."""


class NotFound(NodeError):
    """What the request names is not known there."""


class BadRequest(NodeError):
    """A value is not allowed: of the request, or of what the node was made with."""


class TooBusy(NodeError):
    """The node does as much as it may."""


class WrongBytes(NodeError):
    """A record came with other bytes than were stored."""


class Failed(NodeError):
    """Anything else; also work that was begun there and did not end well."""


CLASSES: Final[dict[grpc.StatusCode, type[NodeError]]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,  # by the node, which ends
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.UNAUTHENTICATED: NotKnown,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooBusy,
}


class Ended(Protocol):
    """A call that failed, of either kind of gRPC."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def error_of(call: Ended, target: str) -> NodeError:
    """What a failed call is for us. target: whom it was of."""
    info, retry = ErrorInfo(), RetryInfo()
    retry_after_s = None
    for packed in _details(call):
        with suppress(DecodeError):  # a node that says it wrongly says nothing
            packed.Unpack(info)
            if packed.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    code = call.code()
    kind, said = CLASSES.get(code, Failed), call.details() or code.name
    where = f"{target}: " if kind in (Unreachable, DeadlinePassed) else ""
    return kind(where + said, info.reason or code.name, retry_after_s)


def parsed(kind: Any, message: bytes) -> Any:
    """A message of this kind. Raises Failed."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Failed(f"no {kind.DESCRIPTOR.name}: {error}", "ANSWER") from error


def _details(call: Ended) -> list[Any]:
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                return list(Status.FromString(value).details)
            except DecodeError:
                break
    return []
