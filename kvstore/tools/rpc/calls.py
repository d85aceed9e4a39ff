"""The one place where every call passes, whatever its service.

    call ─▶ who asks? (Gate) ─▶ may it? (ACCESS) ─▶ servicer ─▶ answer
                │ no                │ no               │ KvstoreError
                ▼                   ▼                  ▼
          UNAUTHENTICATED   PERMISSION_DENIED   google.rpc.Status: code, ErrorInfo, RetryInfo

Whatever the method, gRPC hands a call over with its headers: what is said above is looked at before anything of a message is read. A
call counts as under way until its last answer is taken, or it is gone.

A servicer has a coroutine for each of its service's methods, of the method's name in snake_case. It takes a `Call` and, where
the client sends one message, the request; it returns the answer or, where it sends several, calls `call.write`. It raises
KvstoreError; a bug of ours is logged and becomes INTERNAL. The deadline of a call is `call.until`; a call without one has
CALL_S. The end of a call, however it comes, cancels the servicer's coroutine.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeVar
from weakref import WeakValueDictionary

import grpc
import msgspec
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvstore.errors import (
    BadRequest,
    Internal,
    KvstoreError,
    LimitExceeded,
    NotAllowed,
    Refused,
    RequestError,
    Unavailable,
)
from kvstore.security import audit
from kvstore.security.identity import Gate, bearer
from kvstore.security.principals import Access, Principal

CALL_S = 30.0  # of a call whose client sets no deadline
PAUSE_S = 30.0  # that a client may send nothing for, where a message is expected
ALL_CALLS_MAX = 1024  # under way …
CALLS_OF_ONE_MAX = 512  # … of one who asks …
OPEN_CALLS_MAX = 256  # … of all who need not be known …
OPEN_OF_ONE_MAX = 64  # … and of one address, at one method
MESSAGES_OF_ONE_MAX = 64  # of which a part has come: more are not read before those are whole
OPEN_MESSAGES_OF_ONE_MAX = 8
LARGE_BYTES = 1 << 20  # an answer with more is a large one …
LARGE_BYTES_MAX = (
    256 << 20
)  # … of which there are so many bytes at a time: whoever takes none keeps them in our memory
MESSAGE_CHARS_MAX = 2000  # of an error: it travels among the metadata, twice
RETRY_S = 0.5  # after which a client may try again what was refused for now

T = TypeVar("T")

log = logging.getLogger("kvstore.grpc")

# What each method needs. "known": nothing but a known caller. "open": not even that.
ACCESS: Final[Mapping[str, Access | Literal["known", "open"]]] = {
    "Health/Check": "open",
    "Health/List": "open",
    "Health/Watch": "open",
    "ServerReflection/ServerReflectionInfo": "known",
    "CacheService/Lookup": "read",
    "CacheService/Get": "read",
    "CacheService/Put": "write",
    "CacheService/Prefetch": "read",
    "CacheService/Pin": "admin",
    "CacheService/Unpin": "admin",
    "CacheService/Erase": "admin",
    "CacheService/Explain": "view",
    "CacheService/SetTtl": "admin",
    "CacheService/FindPrefixes": "admin",
    "CacheService/SetQuota": "admin",
    "CacheService/ListRules": "view",
    "CacheService/ListNamespaces": "read",
    "CacheService/RegisterNamespace": "write",
    "ModelService/ListModels": "view",
    "ModelService/GetModel": "view",
    "ModelService/PublishModel": "publisher",
    "ModelService/RemoveModel": "publisher",
    "ModelService/CollectModels": "publisher",
    "ModelService/VerifyModel": "admin",
    "ModelService/PreloadModel": "admin",
    "ModelService/LoadModel": "admin",
    "ModelService/UnloadModel": "admin",
    "ModelService/PinModel": "admin",
    "ModelService/UnpinModel": "admin",
    "ModelService/EvictModel": "admin",
    "RegionService/ListRegions": "view",
    "RegionService/GetRegions": "view",
    "RegionService/PlanWarming": "admin",
    "RegionService/WarmRegion": "admin",
    "RegionService/CancelWarming": "admin",
    "RegionService/VerifyRegion": "admin",
    "RegionService/PlanErasure": "admin",
    "RegionService/EraseRegions": "admin",
    "RegionService/ListErasures": "admin",
    "RegionService/CancelErasure": "admin",
    "ReportService/GetReport": "view",
    "ReportService/WatchFigures": "view",
    "NodeService/GetNode": "view",
    "NodeService/GetPrincipal": "known",
    "NodeService/ListSettings": "admin",
    "NodeService/ChangeSetting": "admin",
    "NodeService/CheckNode": "admin",
    "NodeService/ListOperations": "view",
    "NodeService/GetOperation": "view",
    "NodeService/WatchOperation": "view",
    "NodeService/CancelOperation": "view",  # and what beginning it needed
}
# What there is for who asks as a tenant: each of these answers with what is that tenant's, and nothing else.
FOR_TENANTS: Final = frozenset(
    {
        "ServerReflection/ServerReflectionInfo",
        "CacheService/Lookup",
        "CacheService/Get",
        "CacheService/Put",
        "CacheService/Prefetch",
        "CacheService/Explain",
        "CacheService/ListNamespaces",
        "ReportService/GetReport",
        "ReportService/WatchFigures",
        "NodeService/GetNode",
        "NodeService/GetPrincipal",
    }
)
_AUDITED_TOO: Final = frozenset({"NodeService/CancelOperation"})
_CODES: Final = {
    "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
    "not_allowed": grpc.StatusCode.PERMISSION_DENIED,
    "not_known": grpc.StatusCode.UNAUTHENTICATED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "unknown_namespace": grpc.StatusCode.NOT_FOUND,
    "namespace_conflict": grpc.StatusCode.ALREADY_EXISTS,
    "in_use": grpc.StatusCode.FAILED_PRECONDITION,
    "failed": grpc.StatusCode.FAILED_PRECONDITION,
    "limit_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too_many_connections": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "not_ready": grpc.StatusCode.UNAVAILABLE,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unknown_lease": grpc.StatusCode.ABORTED,
    "lease_expired": grpc.StatusCode.ABORTED,
}
_RETRIED: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})


class Large:
    """Bytes of large answers that are on their way, of all calls."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> int:
        """How many of these count; give them back with `sent`. Raises LimitExceeded."""
        if size <= LARGE_BYTES:
            return 0
        if self._bytes + size > LARGE_BYTES_MAX:
            raise LimitExceeded(f"large answers are on their way, {self._bytes} bytes of {LARGE_BYTES_MAX}")
        self._bytes += size
        return size

    def sent(self, size: int) -> None:
        self._bytes -= size


@dataclass(frozen=True, slots=True)
class Call:
    """until: monotonic; when it must be over. context: of grpc.aio."""

    method: str
    principal: Principal
    until: float
    context: Any
    large: Large = field(default_factory=Large)

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    async def write(self, message: Message | bytes) -> None:
        """One of several answers. Waits until it is taken off our hands. Bytes are of records, which have limits of their own. Raises
        LimitExceeded."""
        content = _serialized(message)
        counted = self.large.add(len(content)) if message is not content else 0
        del message  # it would stay for as long as the client takes nothing
        try:
            await self.context.write(content)
        except grpc.aio.InternalError as error:  # the client is gone; its call is about to be cancelled
            raise asyncio.CancelledError from error
        finally:
            self.large.sent(counted)

    async def next(self) -> Any:
        """What the client sends next; None: nothing. Raises TimeoutError."""
        async with within(PAUSE_S, "nothing came"):
            message = await self.context.read()
        return None if message is grpc.aio.EOF else message

    async def messages(self) -> AsyncIterator[Any]:
        """What the client sends, until it has no more."""
        while (message := await self.context.read()) is not grpc.aio.EOF:
            yield _whole(message)


class Calls:
    """All calls of one server. taken: by method and code, since the start. sockname: where the server listens."""

    def __init__(self, gate: Gate) -> None:
        self.taken: Counter[tuple[str, str]] = Counter()
        self._gate = gate
        self._underway: Counter[str] = Counter()  # by who asks
        self._open_underway = 0  # of those, of who need not be known
        self._reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._large = Large()
        self.sockname: tuple[str, int] | None = None

    def handler(
        self, service: ServiceDescriptor, servicer: object, raw: Iterable[str] = (), name: str = ""
    ) -> grpc.GenericRpcHandler:
        """raw: methods whose requests stay bytes. name: in place of the service's own."""
        handlers = {
            method.name: self._handler(method, getattr(servicer, snake(method.name)), method.name in raw)
            for method in service.methods
        }
        return grpc.method_handlers_generic_handler(name or service.full_name, handlers)

    def _handler(self, method: MethodDescriptor, work: Any, is_raw: bool) -> grpc.RpcMethodHandler[Any, Any]:
        name = f"{method.containing_service.name}/{method.name}"
        access = ACCESS[name]
        parse = partial(_parsed, GetMessageClass(method.input_type))
        # One message is parsed once it is known who sent it.
        coding: Any = (parse if method.client_streaming and not is_raw else None, _serialized)

        async def passed(_: object, context: Any) -> Any:
            return await self._pass(name, access, context, None if method.client_streaming else parse, work)

        # As if the client sent a stream: of a call with one message we would hear only when all of that has come.
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if method.server_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(passed, *coding)  # type: ignore[no-any-return]

    async def _pass(
        self,
        method: str,
        access: Access | Literal["known", "open"],
        context: Any,
        parse: Callable[[bytes], Message | None] | None,
        work: Callable[..., Awaitable[Any]],
    ) -> Any:
        """parse: where the client sends one message."""
        who, outcome, request = "", "CANCELLED", None
        try:
            principal = self._admitted(method, access, context)
            who = str(principal)
            self._count(who, access == "open", context)
            left_s = context.time_remaining()
            until = time.monotonic() + (CALL_S if left_s is None else left_s)
            call = Call(method, principal, until, context, self._large)
            if parse is not None:
                request = _whole(parse(await self._message(call, who, access == "open")))
            answer = await work(call, *([request] if parse else []))
            content = self._bounded(answer, context) if answer is not None else None
            outcome = "OK"
            return content
        except grpc.aio.AbortError:
            outcome = context.code().name if context.code() else "UNKNOWN"
            raise
        except Exception as error:  # noqa: BLE001 - the one place where a failure becomes a status
            status = rpc_status.to_status(status_of(error, method))
            outcome = status.code.name
            with suppress(grpc.aio.InternalError):  # the client is gone
                await context.abort(status.code, status.details, status.trailing_metadata)
        finally:
            self.taken[method, outcome] += 1
            if access in audit.AUDITED or method in _AUDITED_TOO:
                _audit(who, access, method, request, outcome)

    def _count(self, who: str, is_open: bool, context: Any) -> None:
        """One more is under way, until it is gone: its handler may have ended long before. Raises LimitExceeded."""
        of_one_max = OPEN_OF_ONE_MAX if is_open else CALLS_OF_ONE_MAX
        if self._underway[who] >= of_one_max:
            raise LimitExceeded(f"{of_one_max} calls of {who} are under way")
        if is_open and self._open_underway >= OPEN_CALLS_MAX:
            raise LimitExceeded(f"{OPEN_CALLS_MAX} calls of anybody are under way")
        if self._underway.total() >= ALL_CALLS_MAX:
            raise LimitExceeded(f"{ALL_CALLS_MAX} calls are under way")
        self._underway[who] += 1
        self._open_underway += is_open
        context.add_done_callback(lambda _: self._gone(who, is_open))

    def _gone(self, who: str, is_open: bool) -> None:
        self._open_underway -= is_open
        self._underway[who] -= 1
        if not self._underway[who]:
            del self._underway[who]

    async def _message(self, call: Call, who: str, is_open: bool) -> bytes:
        """The only one of a call. Raises BadRequest, TimeoutError."""
        count_max = OPEN_MESSAGES_OF_ONE_MAX if is_open else MESSAGES_OF_ONE_MAX
        async with self._reading.setdefault(who, asyncio.Semaphore(count_max)):
            message: bytes | None = await call.next()
        return _whole(message)

    def _bounded(self, answer: Message | bytes, context: Any) -> bytes:
        """As it is sent. Raises LimitExceeded."""
        content = _serialized(answer)
        if counted := self._large.add(len(content)):
            context.add_done_callback(lambda _: self._large.sent(counted))
        return content

    def _admitted(self, method: str, access: Access | Literal["known", "open"], context: Any) -> Principal:
        """Who asks. Raises NotKnown, NotAllowed."""
        if access == "open":
            # One for each method: who only watches keeps no probe out; nor does another machine.
            host = context.peer().rpartition(":")[0]
            return Principal(-1, 0, frozenset(), f"anybody at {method} from {host}")
        principal = self._gate.principal(
            context.auth_context(), context.peer(), self.sockname, _token(context.invocation_metadata())
        )
        if access != "known":
            principal.require(access, method)
        if principal.tenant is not None and method not in FOR_TENANTS:
            raise NotAllowed(f"{method}: is about all tenants, and {principal} asks as one")
        return principal


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises TimeoutError."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{what} for {seconds:g} s") from error


def status_of(error: Exception, method: str) -> status_pb2.Status:
    """What a client is answered in place of a result."""
    if isinstance(error, Unavailable):
        reason, message = "unavailable", str(error)
    elif isinstance(error, Refused):
        reason, message = error.code, error.message
    elif isinstance(error, RequestError):
        reason, message = error.code, str(error)
    elif isinstance(error, TimeoutError):
        reason, message = "timeout", str(error) or "the deadline has passed"
    else:
        if not isinstance(error, KvstoreError):  # our bug
            log.error("%s failed", method, exc_info=error)
        reason, message = Internal.code, f"{type(error).__name__}; the log of kvstore grpc has more"
    code = _CODES.get(reason, grpc.StatusCode.INTERNAL)
    info: list[Message] = [error_details_pb2.ErrorInfo(reason=reason.upper(), domain="kvstore")]
    if code in _RETRIED:
        info.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=int(RETRY_S * 1e9))))
    status = status_pb2.Status(code=code.value[0], message=message[:MESSAGE_CHARS_MAX])
    for detail in info:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _audit(who: str, access: str, method: str, request: Message | None, outcome: str) -> None:
    audit.note("grpc", who, access, method, told(request) if request is not None else "", outcome)


def told(message: Message) -> str:
    """A request in one line: bytes in hex."""
    return " ".join(f"{field.name}={_told(value)}" for field, value in message.ListFields())


def json_of(document: object) -> str:
    """A document as `-o json` prints it."""
    return msgspec.json.encode(document).decode()


def _told(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return f"({told(value)})" if isinstance(value, Message) else repr(value)


def _token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The bearer token of a call. Raises NotKnown."""
    shown = [str(value) for name, value in metadata or () if name == "authorization"]
    return bearer(shown[0]) if shown else None


def _parsed(kind: type[Message], content: bytes) -> Message | None:
    """None for what is none: gRPC would answer with a code that says nothing."""
    try:
        return kind.FromString(content)
    except DecodeError:
        return None


def _whole(message: T | None) -> T:
    """Raises BadRequest."""
    if message is None:
        raise BadRequest("not a message of this call")
    return message


def _serialized(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def snake(name: str) -> str:
    """ListModels -> list_models."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
