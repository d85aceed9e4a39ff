"""The gRPC server beside the daemon: bind, serve, drain.

    clients ── HTTP/2, TLS ──▶ server ─▶ calls.py ─▶ servicers ─▶ node.py ── local socket ──▶ daemon
                                  │ health v1, reflection

At its end health says NOT_SERVING, calls under way have DRAIN_S to end, and then it is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from kvstore.constants import MIB
from kvstore.daemon.listening import Listen
from kvstore.daemon.process import Signals
from kvstore.errors import NotFound, StartError
from kvstore.security.identity import Gate
from kvstore.tools.beside import bound, until_ended
from kvstore.tools.rpc import models, regions
from kvstore.tools.rpc.cache import Cache
from kvstore.tools.rpc.calls import Call, Calls
from kvstore.tools.rpc.commands import Commands
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.nodes import Nodes
from kvstore.tools.rpc.operations import Operations
from kvstore.tools.rpc.reports import Reports
from kvstore.tools.rpc.streams import Streams
from kvstore.v1 import cache_pb2, nodes_pb2, reports_pb2

MESSAGE_BYTES_MAX = 4 * MIB + 64 * 1024  # a piece of a record, and what is around it
ANSWER_BYTES_MAX = 64 * MIB  # a document: one of 65,536 blocks has 8 MB
METADATA_BYTES_MAX = 16 * 1024
CALLS_MAX = 128  # under way on one connection; of all: see calls.py
CONNECTIONS_MAX = 1024
HANDSHAKE_S = 10.0  # that whoever connects has for it: who says nothing is out
AGE_GRACE_S_MAX = 300.0  # that calls may go on for after the connection's time is over
PING_S_MIN = 10.0  # between two keepalive pings of a client
KEPT_BYTES_MAX = 64 * MIB  # of memory that was freed
FIGURES_S = 60.0  # between two lines of how many calls came
TELL_S = 0.25  # for who watches the health to hear of the end; of DRAIN_S
DRAIN_S = 0.5  # less than the daemon waits at its own end

log = logging.getLogger("kvstore.grpc")

_REFLECTION: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"  # the same messages
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_IDENTITY_ONLY: Final = 1  # of the algorithms of compression: a small message may become a large one


class Settings(NamedTuple):
    """Of one server. credentials: None where it is without TLS."""

    listen: Listen
    socket_path: Path
    connection_age_s: float
    streams_max: int
    credentials: grpc.ServerCredentials | None = None


async def serve(
    settings: Settings, gate: Gate, is_child: bool, ready: Callable[[str], None], signals: Signals
) -> None:
    """Until SIGTERM, SIGINT, or, of a child, the end of its parent. ready: called with a line.

    Raises StartError where it cannot listen and is no child.
    """
    _keep_freed_memory()
    await until_ended(_live(settings, gate, is_child, ready), is_child, signals)


def _keep_freed_memory() -> None:
    """What a message of 1 MiB had is the next one's: glibc would give it back, and the kernel would empty new pages for each."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


async def _live(settings: Settings, gate: Gate, is_child: bool, ready: Callable[[str], None]) -> None:
    node = Node(settings.socket_path)
    operations = Operations(node.settings)
    streams = Streams(settings.socket_path, settings.streams_max)
    door = Door(settings, gate, servicers(node, streams, operations))
    try:
        port = await door.open(is_child, ready)
        log.info("serving gRPC at %s", Listen(settings.listen.host, port))
        ready(f"ready grpc={Listen(settings.listen.host, port)} socket={settings.socket_path}")
        while True:
            await asyncio.sleep(FIGURES_S)
            door.tell_figures()
    finally:
        await door.close()
        await operations.close()
        streams.close()
        node.close()


def servicers(node: Node, streams: Streams, operations: Operations) -> Mapping[ServiceDescriptor, Any]:
    """What is served, besides health and reflection."""
    return {
        cache_pb2.DESCRIPTOR.services_by_name["CacheService"]: Cache(node, streams),
        models.SERVICE: models.Models(node, operations),
        regions.SERVICE: Commands(regions.SERVICE, operations, regions.WORDS),
        reports_pb2.DESCRIPTOR.services_by_name["ReportService"]: Reports(node),
        nodes_pb2.DESCRIPTOR.services_by_name["NodeService"]: Nodes(node, operations),
    }


class Door:
    """One server with all its services."""

    def __init__(self, settings: Settings, gate: Gate, services: Mapping[ServiceDescriptor, Any]) -> None:
        self._settings = settings
        self._services = services
        self._health = _Health([service.full_name for service in services])
        self._server = grpc.aio.server(options=_options(settings))
        self.calls = Calls(gate)
        self._told = self.calls.taken.copy()
        names = [service.full_name for service in services]
        reflected = _Reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME])
        self._server.add_generic_rpc_handlers(
            (
                *(
                    self.calls.handler(s, servicer, getattr(servicer, "RAW", ()))
                    for s, servicer in services.items()
                ),
                self.calls.handler(_HEALTH, self._health),
                self.calls.handler(_REFLECTION, reflected),
                self.calls.handler(_REFLECTION, reflected, name=_REFLECTION_V1),
            )
        )

    async def open(self, is_patient: bool, say: Callable[[str], None]) -> int:
        """The port. say: see `bound`. Raises StartError."""
        while True:
            # gRPC says why it cannot listen in its own log only: so we try first.
            held = await bound("grpc", self._settings.listen, is_patient, say)
            port: int = held.getsockname()[1]
            held.close()
            listen = Listen(self._settings.listen.host, port)
            self.calls.sockname = listen.host, port
            add = self._server.add_insecure_port
            if self._settings.credentials is not None:
                add = partial(self._server.add_secure_port, server_credentials=self._settings.credentials)
            try:
                add(str(listen))
                break
            except RuntimeError as error:  # somebody else was faster
                if not is_patient:
                    raise StartError(f"grpc: cannot listen on {listen}: {error}") from error
        self.calls.sockname = (listen.host, port)
        await self._server.start()
        return port

    def tell_figures(self) -> None:
        """One line of what came since the last one, if anything did."""
        came, self._told = self.calls.taken - self._told, self.calls.taken.copy()
        if came:
            log.info("calls", extra={f"{method} {code}": count for (method, code), count in came.items()})

    async def close(self) -> None:
        """Say so first, then end. Idempotent."""
        await self._health.end()
        await self._server.stop(DRAIN_S - TELL_S)


def _options(settings: Settings) -> list[tuple[str, Any]]:
    age_ms = int(settings.connection_age_s * 1000)
    return [
        ("grpc.so_reuseport", 0),  # or two of us would share a port without a word
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", CALLS_MAX),
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_connection_age_grace_ms", int(min(age_ms, AGE_GRACE_S_MAX * 1000))),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(PING_S_MIN * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),  # a client that went without a word is found
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ]


class _Health:
    """Of all services alike. Who watches is told of the end, however slow another one is."""

    def __init__(self, names: list[str]) -> None:
        self._names = ["", *names]
        self._ending = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()

    async def end(self) -> None:
        """Tell all who watch. Idempotent."""
        self._ending.set()
        if self._watches:
            await asyncio.wait(self._watches, timeout=TELL_S)

    async def check(self, call: Call, request: Any) -> Any:
        if request.service not in self._names:
            raise NotFound(f"no such service: known are {', '.join(self._names[1:])}")
        return self._state(request.service)

    async def list(self, call: Call, request: Any) -> Any:
        return health_pb2.HealthListResponse(statuses={name: self._state(name) for name in self._names})

    async def watch(self, call: Call, request: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        await call.write(self._state(request.service))
        await self._ending.wait()
        await call.write(self._state(request.service))

    def _state(self, name: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse.ServingStatus
        if name not in self._names:
            return health_pb2.HealthCheckResponse(status=states.SERVICE_UNKNOWN)
        return health_pb2.HealthCheckResponse(
            status=states.NOT_SERVING if self._ending.is_set() else states.SERVING
        )


class _Reflection:
    def __init__(self, names: list[str]) -> None:
        self._servicer = ReflectionServicer(names)

    async def server_reflection_info(self, call: Call) -> None:
        async for answer in self._servicer.ServerReflectionInfo(call.messages(), call.context):
            await call.write(answer)
