"""Where a node is, and what proves there who we are: an address, certificates, a token.

    address, files ─▶ Where ─▶ options, credentials ─▶ a channel     a new one when a certificate's file changes; the old one
                        │                                            ends after its calls
                        └─▶ token: read for each call                no file, no call

On this machine (127.0.0.1, ::1, localhost) without certificates there is no TLS: the node knows us by our user. Everywhere
else there is, with `ca` or the authorities of this system, so that no token travels in the open.
"""

from __future__ import annotations

import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc

from kvstore import __version__
from kvstore.remote.errors import BadRequest, NotKnown
from kvstore.security.watched import Watched
from kvstore.v1 import cache_pb2, models_pb2, nodes_pb2, regions_pb2, reports_pb2
from tiers.reading import Unreadable, read_bytes

C = TypeVar("C")

MESSAGE_BYTES_MAX: Final = 64 << 20  # of an answer: a document of 65,536 blocks fits
FILE_BYTES_MAX: Final = 1 << 20
TOKEN_CHARS_MAX: Final = 16 << 10
ATTEMPTS_MAX: Final = 5
# Repeated, these would do something twice, or tell it wrongly.
NOT_REPEATED: Final = frozenset(
    {
        *("Put", "ChangeSetting", "PublishModel", "RemoveModel", "CollectModels", "VerifyModel"),
        *("PreloadModel", "LoadModel", "WarmRegion", "VerifyRegion", "EraseRegions"),
        *("Erase", "UnloadModel", "EvictModel", "CancelWarming", "CancelErasure"),
    }
)
# By "CacheService/Lookup".
METHODS: Final = {
    f"{service.name}/{method.name}": method
    for file in (cache_pb2, models_pb2, nodes_pb2, regions_pb2, reports_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def service_config(multiplier: float = 3.0, pause_s_max: float = 5.0) -> str:
    """Calls that may be repeated are, where nobody answers: over some 8 s, so that a node may restart meanwhile. Streams are not: our
    own steps begin them anew, and one that gRPC repeats may wait for a node that was killed until its deadline."""
    repeated = [
        {"service": method.containing_service.full_name, "method": method.name}
        for method in METHODS.values()
        if method.name not in NOT_REPEATED and not method.server_streaming
    ]
    # CANCELLED, where it was not us: a call that came in at the moment when the server ended.
    policy = {
        "maxAttempts": ATTEMPTS_MAX,
        "initialBackoff": "0.25s",
        "maxBackoff": f"{pause_s_max}s",
        "backoffMultiplier": multiplier,
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    # 500 failures that no success made good end all repeating.
    throttling = {"maxTokens": 1000, "tokenRatio": 1}
    return json.dumps(
        {"methodConfig": [{"name": repeated, "retryPolicy": policy}], "retryThrottling": throttling}
    )


OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long an attempt to connect may take
    ("grpc.enable_http_proxy", 0),  # a node is called by its own address
    ("grpc.service_config", service_config()),
    ("grpc.primary_user_agent", f"kvstore/{__version__}"),
)


class Where:
    """address: HOST:PORT. ca: who signs the node's certificate; certificate, key: ours; token_file: a bearer token. Raises
    BadRequest."""

    def __init__(
        self,
        address: str,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        if bool(certificate) != bool(key):
            raise BadRequest("a certificate and its key: both or none of them", "CERTIFICATES")
        self.target = address
        host = _host(address)
        self._files = tuple(Path(path) if path else None for path in (ca, key, certificate))
        self.is_plain = not any(self._files) and _is_loopback(host)
        self.watched = Watched([path for path in self._files if path is not None])
        self._token_file = Path(token_file) if token_file else None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: no TLS. Raises BadRequest."""
        if self.is_plain:
            return None
        ca, key, certificate = (_read(path) if path else None for path in self._files)
        _require_usable(*self._files)
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What proves who we are, with each call. Raises NotKnown: without the token nothing is asked."""
        if self._token_file is None:
            return ()
        return (("authorization", f"Bearer {_token(self._token_file)}"),)


class Line(Generic[C]):
    """A channel, and how many calls go on."""

    def __init__(self, channel: C) -> None:
        self.channel, self.calls = channel, 0


class Lines(Generic[C]):
    """The channel in use, and those that end after their calls. For many threads. open_channel: by these credentials."""

    def __init__(
        self, where: Where, open_channel: Callable[[str, grpc.ChannelCredentials | None], C]
    ) -> None:
        self._where, self._open = where, open_channel
        self._lock = threading.Lock()
        self._line: Line[C] | None = None
        self._leaving: list[Line[C]] = []

    def take(self) -> Line[C]:
        """For one call; give it back. Raises BadRequest."""
        with self._lock:
            if self._where.watched.has_changed() or self._line is None:
                self._renew()
            assert self._line is not None
            self._line.calls += 1
            return self._line

    def give_back(self, line: Line[C]) -> list[C]:
        """The channels to close now."""
        with self._lock:
            line.calls -= 1
            return self._over()

    def close(self) -> list[C]:
        with self._lock:
            self._leave()
            return self._over()

    def _renew(self) -> None:
        """Files that are not there, or do not fit, as while they are replaced one by one, replace nothing. Raises BadRequest at the
        first time."""
        try:
            new = Line(self._open(self._where.target, self._where.credentials()))
        except BadRequest:
            self._where.watched.forget()
            if self._line is None:
                raise
        else:
            self._leave()
            self._line = new

    def _leave(self) -> None:
        if self._line is not None:
            self._leaving.append(self._line)
            self._line = None

    def _over(self) -> list[C]:
        over = [line for line in self._leaving if not line.calls]
        self._leaving = [line for line in self._leaving if line.calls]
        return [line.channel for line in over]


def _host(address: str) -> str:
    found = re.fullmatch(r"\[([0-9a-fA-F:.]+)\]:(\d{1,5})|([A-Za-z0-9._-]+):(\d{1,5})", address)
    if not found or not 0 < int(found[2] or found[4]) < 1 << 16:
        raise BadRequest(f"{address or '(nothing)'}: allowed is HOST:PORT", "ADDRESS")
    return found[1] or found[3]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, FILE_BYTES_MAX)
    except Unreadable as error:
        raise BadRequest(str(error), "CERTIFICATES") from error


def _require_usable(ca: Path | None, key: Path | None, certificate: Path | None) -> None:
    """With those that are not, gRPC says of the node that it cannot be reached. Raises BadRequest."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrong = f"{ca}: not certificates in PEM"
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            wrong = f"{certificate} or its key {key}: not PEM that can be used without a password"
            context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            wrong = f"{key}: not the key of {certificate}"
        raise BadRequest(wrong, "CERTIFICATES") from error


def _token(path: Path) -> str:
    try:
        text = _read(path).decode("ascii").strip()
    except BadRequest as error:
        raise NotKnown(f"token file {path}: cannot be read; nothing was asked", "NO_TOKEN") from error
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > TOKEN_CHARS_MAX or not text.isprintable() or " " in text:
        raise NotKnown(f"token file {path}: has no token in it; nothing was asked", "NO_TOKEN")
    return text
