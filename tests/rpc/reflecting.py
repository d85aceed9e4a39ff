"""A client that knows nothing of the API but that the server reflects it: what grpcurl does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

TIMEOUT_S = 60.0


class Reflecting:
    """Of one server. token: that it shows with each call. credentials: with TLS. ahead_bytes: what comes before a stream of answers
    is read further, and no more; where none is said gRPC decides from what it measures, up to many MiB."""

    def __init__(
        self,
        target: str,
        token: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        ahead_bytes: int | None = None,
    ) -> None:
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = [("grpc.http2.lookahead_bytes", ahead_bytes), ("grpc.http2.bdp_probe", 0)] * bool(
            ahead_bytes
        )
        channel = (
            grpc.secure_channel(target, credentials, options)
            if credentials
            else grpc.insecure_channel(target, options)
        )
        self.channel = channel
        with_token = grpc.intercept_channel(channel, _Shown(self.metadata))
        self.database = ProtoReflectionDescriptorDatabase(with_token)
        self.pool = DescriptorPool(self.database)

    def methods(self) -> dict[str, MethodDescriptor]:
        """All of our services, as "Service/Method"."""
        services = [name for name in self.database.get_services() if name.startswith("kvstore.")]
        found = [method for name in services for method in self.pool.FindServiceByName(name).methods]
        return {f"{method.containing_service.name}/{method.name}": method for method in found}

    def call(self, name: str, /, **request: Any) -> dict[str, Any]:
        """The answer to one message, as JSON has it. Raises grpc.RpcError."""
        return _plain(self._unary("unary_unary", name, request))

    def stream(self, name: str, /, **request: Any) -> Iterator[dict[str, Any]]:
        """The answers to one message."""
        stream = self._unary("unary_stream", name, request)
        try:
            yield from map(_plain, stream)
        finally:
            stream.cancel()

    def refused(self, name: str, /, **request: Any) -> tuple[str, str, str]:
        """Code, reason and message with which a call is refused."""
        try:
            answer = (
                next(self.stream(name, **request))
                if self._method(name).server_streaming
                else self.call(name, **request)
            )
        except grpc.RpcError as error:
            status = rpc_status.from_call(error)
            info = error_details_pb2.ErrorInfo()
            if status is not None:
                status.details[0].Unpack(info)
            return str(error.code().name), info.reason, str(error.details())
        raise AssertionError(f"{name} answers {answer}")

    def __call__(self, name: str, /, **fields: Any) -> Any:
        """The answer to a message of these fields, as a message. Raises grpc.RpcError."""
        return self.start(name, [fields])

    def start(
        self, name: str, requests: Iterable[Mapping[str, Any]], timeout: float = TIMEOUT_S, **options: Any
    ) -> Any:
        """Any call, whatever streams: what is sent, as fields of messages. What gRPC returns."""
        found = self._method(name)
        kinds = (
            "stream" if streams else "unary" for streams in (found.client_streaming, found.server_streaming)
        )
        make = getattr(self.channel, "_".join(kinds))(
            f"/kvstore.v1.{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        kind = GetMessageClass(found.input_type)
        messages = (kind(**fields) for fields in requests)
        what = messages if found.client_streaming else next(messages)
        return make(what, timeout=timeout, metadata=self.metadata, **options)

    def method_future(self, name: str, fields: Mapping[str, Any], timeout: float = TIMEOUT_S) -> Any:
        """The answer to one message, which is not waited for."""
        found = self._method(name)
        make = self.channel.unary_unary(
            f"/kvstore.v1.{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        return make.future(
            GetMessageClass(found.input_type)(**fields), timeout=timeout, metadata=self.metadata
        )

    def close(self) -> None:
        self.channel.close()

    def _method(self, name: str) -> MethodDescriptor:
        service, _, method = name.partition("/")
        found: MethodDescriptor = self.pool.FindServiceByName(f"kvstore.v1.{service}").methods_by_name[method]
        return found

    def _unary(self, kind: str, name: str, request: dict[str, Any]) -> Any:
        found = self._method(name)
        asked = json_format.ParseDict(request, GetMessageClass(found.input_type)())
        make = getattr(self.channel, kind)(
            f"/kvstore.v1.{name}",
            request_serializer=type(asked).SerializeToString,
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        return make(asked, timeout=TIMEOUT_S, metadata=self.metadata)


def reason(error: grpc.RpcError) -> str:
    """The reason of a refusal; with ", retry" where it may be tried again."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info) and info.domain == "kvstore"
    return str(info.reason) + ", retry" * any(d.type_url.endswith("RetryInfo") for d in status.details)


def _plain(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


class _Shown(grpc.StreamStreamClientInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(_Details(details.method, details.timeout, self._metadata), requests)


class _Details(grpc.ClientCallDetails):
    def __init__(self, method: str, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> None:
        self.method, self.timeout, self.metadata = method, timeout, metadata
        self.credentials = self.wait_for_ready = self.compression = None
