"""A raw connection that says what a test wants it to say."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec

from kvstore.protocol import frames
from tests.door.conftest import HASH_BYTES, RECORD_BYTES

REGISTER = frames.Register(b"d" * 16, RECORD_BYTES, HASH_BYTES, 16, {})


class Peer:
    """A raw connection that says what a test wants it to say."""

    def __init__(self, path: Path, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        self.socket.connect(str(path))
        if hello:
            self.socket.sendall(frames.encode_frame(frames.Hello(frames.PROTOCOL_VERSION, "peer")))
            answer = frames.welcome_decoder.decode(self.receive())
            assert isinstance(answer, frames.Welcome)

    def receive(self) -> bytes:
        """The next payload; b"" when the daemon hung up."""
        header = self._exactly(frames.HEADER_BYTES)
        return self._exactly(frames.HEADER.unpack(header)[0]) if header else b""

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self.socket.recv(size - len(data))
            except ConnectionResetError:
                return b""
            if not part:
                return b""
            data += part
        return data

    def ask(self, request: msgspec.Struct) -> Any:
        self.socket.sendall(frames.encode_frame(request))
        return frames.answer_decoder.decode(self.receive())

    def error(self) -> str:
        answer = frames.answer_decoder.decode(self.receive())
        assert isinstance(answer, frames.Error)
        assert answer.message
        return answer.code

    def code_of(self, request: msgspec.Struct) -> str:
        answer = self.ask(request)
        assert isinstance(answer, frames.Error), answer
        assert answer.message
        return answer.code

    def register(self, hash_bytes: int = HASH_BYTES) -> int:
        answer = self.ask(msgspec.structs.replace(REGISTER, hash_bytes=hash_bytes))
        assert isinstance(answer, frames.Registered)
        return answer.namespace

    def is_hung_up(self) -> bool:
        return self.receive() == b""
