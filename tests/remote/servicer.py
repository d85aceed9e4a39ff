"""A gRPC server whose answers a test decides, and nodes of both kinds that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from kvstore.remote import AsyncNode, Node, Operation
from kvstore.remote.places import METHODS

Answer = Callable[[Any, grpc.ServicerContext], Any]


class Servicer(grpc.GenericRpcHandler):
    """answers: by "CacheService/Pin"; each takes the request (an iterator of them in bytes, of Put) and the context. calls: what was
    asked, in order."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {name.replace("__", "/"): answer for name, answer in answers.items()}
        self.calls: list[str] = []
        self.tokens: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        name = details.method.removeprefix("/kvstore.v1.")
        self.calls.append(name)
        self.tokens += [str(v) for k, v in details.invocation_metadata or () if k == "authorization"]
        if name not in self.answers:
            return None
        method, answer = METHODS[name], self.answers[name]
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(answer, None, serialized)
        parse = _parser(method.input_type)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answer, parse, serialized)
        return grpc.unary_unary_rpc_method_handler(answer, parse, serialized)


def serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _parser(kind: Any) -> Callable[[bytes], Any]:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(kind).FromString


@contextmanager
def serving(servicer: Servicer, port: int = 0, credentials: Any = None) -> Iterator[int]:
    """Its port."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((servicer,))
    place = f"127.0.0.1:{port}"
    port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


class Asked:
    """A node of either kind, asked by a test: iterators are lists."""

    def __init__(self, kind: str, address: str, **options: Any) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        if kind == "threads":
            self.node: Any = Node(address, **options)
            return
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.node = AsyncNode(address, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any, **fields: Any) -> Any:
            return self.of(lambda: getattr(self.node, name)(*values, **fields))

        return call

    def of(self, made: Callable[[], Any]) -> Any:
        """What a call brings, in whatever way it is had."""
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(_had(made), self._loop).result(60)
        found = made()
        return list(found) if isinstance(found, Iterator) else found

    def close(self) -> None:
        self.of(self.node.close)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


async def _had(made: Callable[[], Any]) -> Any:
    found = made()
    if isinstance(found, AsyncIterator):
        return [item async for item in found]
    return await found if isinstance(found, Coroutine) else found


def ended(asked: Asked, operation: Operation, how: str) -> Any:
    """What `watch`, `result` or `cancel` of an operation brings."""
    return asked.of(getattr(operation, how))
