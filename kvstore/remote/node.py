"""A node, for threads (`Node`) and for asyncio (`AsyncNode`): all of its calls, and how the steps of each are taken."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore.remote import calls, records
from kvstore.remote.calls import (
    SLOW_S,
    Ask,
    Call,
    Emit,
    Method,
    Open,
    Operation,
    Pause,
    Read,
    Step,
    Steps,
    Walk,
    Write,
)
from kvstore.remote.errors import NodeError, Unreachable, error_of, parsed
from kvstore.remote.places import METHODS, OPTIONS, Line, Lines, Where

C = TypeVar("C")

TIMEOUT_S: Final = 10.0  # of a call that says nothing else
WRITES_AHEAD: Final = 2  # pieces that wait to be sent
_LOOK_S: Final = 0.2


class Calls:
    """address, certificates, token: see `Where`. timeout_s: of each call; by default 10 s, and more for what takes long.

    Each method is an RPC of docs/grpc.md. What begins an operation returns it: watch(), result(), cancel().
    """

    _open: Callable[..., Any]  # a channel: to whom, by which credentials

    def __init__(
        self,
        address: str,
        *,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token_file: str | Path | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.where = Where(address, ca, certificate, key, token_file)
        self._timeout_s = timeout_s
        self._lines: Lines[Any] = Lines(self.where, self._open)

    def within(self, timeout_s: float) -> Self:
        """The same node, with this deadline for each call."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _timeout_s=timeout_s)
        return other

    lookup, explain = Method("answer", calls.lookup), Method("answer", calls.explain)
    get_records, put_records = Method("items", records.get_records), Method("answer", records.put_records)
    prefetch, find_prefixes = Call("CacheService/Prefetch"), Call("CacheService/FindPrefixes")
    pin, unpin = Call("CacheService/Pin"), Call("CacheService/Unpin")
    erase, rules = Call("CacheService/Erase", SLOW_S), Call("CacheService/ListRules")
    set_ttl, set_quota = Call("CacheService/SetTtl"), Call("CacheService/SetQuota")
    namespaces = Method("answer", calls.namespaces)
    register_namespace = Call("CacheService/RegisterNamespace")

    list_models, get_model = Call("ModelService/ListModels", SLOW_S), Call("ModelService/GetModel", SLOW_S)
    publish_model, remove_model = Call("ModelService/PublishModel"), Call("ModelService/RemoveModel")
    collect_models, verify_model = Call("ModelService/CollectModels"), Call("ModelService/VerifyModel")
    preload_model, evict_model = Call("ModelService/PreloadModel"), Call("ModelService/EvictModel", SLOW_S)
    load_model, unload_model = Call("ModelService/LoadModel"), Call("ModelService/UnloadModel")
    pin_model, unpin_model = Call("ModelService/PinModel", SLOW_S), Call("ModelService/UnpinModel", SLOW_S)

    list_regions, get_regions = (
        Call("RegionService/ListRegions", SLOW_S),
        Call("RegionService/GetRegions", SLOW_S),
    )
    plan_warming, cancel_warming = (
        Call("RegionService/PlanWarming", SLOW_S),
        Call("RegionService/CancelWarming", SLOW_S),
    )
    warm_region, verify_region = Call("RegionService/WarmRegion"), Call("RegionService/VerifyRegion")
    plan_erasure, cancel_erasure = (
        Call("RegionService/PlanErasure", SLOW_S),
        Call("RegionService/CancelErasure", SLOW_S),
    )
    erase_regions, list_erasures = (
        Call("RegionService/EraseRegions"),
        Call("RegionService/ListErasures", SLOW_S),
    )

    report, watch_figures = Call("ReportService/GetReport"), Method("items", calls.watch_figures)

    status, caller = Call("NodeService/GetNode"), Call("NodeService/GetPrincipal")
    settings, change_setting = Call("NodeService/ListSettings"), Call("NodeService/ChangeSetting")
    check, operations = Call("NodeService/CheckNode", SLOW_S), Call("NodeService/ListOperations")
    operation = Call("NodeService/GetOperation")


class Node(Calls):
    """A node, for threads."""

    @staticmethod
    def _open(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(target, OPTIONS)
        return grpc.secure_channel(target, credentials, OPTIONS)

    def close(self) -> None:
        """End the connection, once the calls that go on have ended."""
        for channel in self._lines.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, steps: Steps) -> Any:
        """Takes all of the steps; what they return. Raises NodeError."""
        walk = Walk(steps)
        for _ in self._walked(walk):
            pass
        return walk.returned

    def items(self, steps: Steps) -> Iterator[Any]:
        """Takes all of the steps; what they emit. Raises NodeError."""
        return self._walked(Walk(steps))

    def begun(self, steps: Steps) -> Operation:
        return Operation(self, self.answer(steps))

    def _walked(self, walk: Walk) -> Iterator[Any]:
        talk = _Talk(self.where, self._lines, self._timeout_s)
        try:
            while walk.step is not None:
                if isinstance(walk.step, Emit):
                    yield walk.step.item
                walk.go_on(*talk.take(walk.step))
        finally:
            talk.close()


class AsyncNode(Calls):
    """A node, for the event loop of its first call: methods are awaited, iterators asynchronous."""

    @staticmethod
    def _open(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, OPTIONS)
        return grpc.aio.secure_channel(target, credentials, OPTIONS)

    async def close(self) -> None:
        """End the connection, once the calls that go on have ended."""
        for channel in self._lines.close():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def answer(self, steps: Steps) -> Any:
        """Takes all of the steps; what they return. Raises NodeError."""
        walk = Walk(steps)
        async for _ in self._walked(walk):
            pass
        return walk.returned

    def items(self, steps: Steps) -> AsyncIterator[Any]:
        """Takes all of the steps; what they emit. Raises NodeError."""
        return self._walked(Walk(steps))

    async def begun(self, steps: Steps) -> Operation:
        return Operation(self, await self.answer(steps))

    async def _walked(self, walk: Walk) -> AsyncIterator[Any]:
        talk = _AsyncTalk(self.where, self._lines, self._timeout_s)
        try:
            while walk.step is not None:
                if isinstance(walk.step, Emit):
                    yield walk.step.item
                walk.go_on(*await talk.take(walk.step))
        finally:
            await talk.close()


class _Begun(Generic[C]):
    """The call that goes on, of one kind of gRPC."""

    def __init__(self, where: Where, lines: Lines[C], timeout_s: float | None) -> None:
        self._where, self._lines, self._timeout_s = where, lines, timeout_s
        self._line: Line[C] | None = None
        self._call: Any = None

    def _begin(self, step: Ask | Open, kind: str, *requests: Any) -> Any:
        """Raises NodeError."""
        metadata = self._where.metadata()
        self._line = self._lines.take()
        call = getattr(self._line.channel, kind)(f"/kvstore.v1.{step.method}")
        timeout_s = self._timeout_s or step.timeout_s or TIMEOUT_S
        if step.request is not None:
            requests = (step.request.SerializeToString(),)
        return call(*requests, timeout=timeout_s, metadata=metadata)

    def _end(self) -> list[C]:
        """Whatever goes on ends; the channels to close."""
        call, line, self._call, self._line = self._call, self._line, None, None
        if call is not None:
            call.cancel()
        return self._lines.give_back(line) if line is not None else []


class _Talk(_Begun[grpc.Channel]):
    """Steps, taken by a thread that waits."""

    def take(self, step: Step) -> tuple[Any, NodeError | None]:
        """The result, or the failure."""
        try:
            return self._take(step), None
        except grpc.RpcError as error:
            return None, error_of(error, self._where.target)
        except NodeError as error:
            return None, error
        except ValueError as error:  # gRPC: the channel was closed
            return None, Unreachable(f"{self._where.target}: {error}", "CLOSED")

    def _take(self, step: Step) -> Any:
        match step:
            case Ask():
                self.close()
                return answer_of(step, self._begin(step, "unary_unary"))
            case Open(request=None):
                self.close()
                self._requests: queue.Queue[bytes | None] = queue.Queue(WRITES_AHEAD)
                self._call = self._begin(step, "stream_stream", iter(self._requests.get, None))
            case Open():
                self.close()
                self._requests = queue.Queue(WRITES_AHEAD)
                self._call = self._begin(step, "unary_stream")
            case Write():
                self._write(step.message)
            case Read():
                return next(self._call, None)
            case Pause():
                time.sleep(step.seconds)
        return None

    def _write(self, message: bytes | None) -> None:
        """Waits while enough is on its way; a stream that has ended takes nothing, and its next answer says why."""
        while self._call.is_active():
            try:
                self._requests.put(message, timeout=_LOOK_S)
                break
            except queue.Full:
                continue

    def close(self) -> None:
        is_stream = self._call is not None
        for channel in self._end():
            channel.close()
        if is_stream:  # gRPC's thread waits for the next request
            with contextlib.suppress(queue.Empty):
                while True:
                    self._requests.get_nowait()
            self._requests.put_nowait(None)


class _AsyncTalk(_Begun[grpc.aio.Channel]):
    """Steps, awaited."""

    async def take(self, step: Step) -> tuple[Any, NodeError | None]:
        """The result, or the failure."""
        try:
            return await self._take(step), None
        except grpc.aio.AioRpcError as error:
            return None, error_of(error, self._where.target)
        except NodeError as error:
            return None, error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:  # gRPC: the channel was closed
            return None, Unreachable(f"{self._where.target}: {error}", "CLOSED")

    async def _take(self, step: Step) -> Any:
        match step:
            case Ask():
                await self.close()
                return answer_of(step, await self._begin(step, "unary_unary"))
            case Open():
                await self.close()
                kind = "unary_stream" if step.request is not None else "stream_stream"
                self._call = self._begin(step, kind)
            case Write(message=None):
                await self._call.done_writing()
            case Write() if not self._call.done():  # else its next answer says why
                await self._call.write(step.message)
            case Read():
                message = await self._call.read()
                return None if message is grpc.aio.EOF else message
            case Pause():
                await asyncio.sleep(step.seconds)
        return None

    async def close(self) -> None:
        for channel in self._end():
            await channel.close()


def answer_of(step: Ask, message: bytes) -> Message:
    return parsed(GetMessageClass(METHODS[step.method].output_type), message)  # type: ignore[no-any-return]
