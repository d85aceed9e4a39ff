"""Inbox: the bytes that one peer sent, and the frames in them.

    socket ─▶ shared receive buffer ─▶ what is not a whole frame yet, or not served: `_data`

A frame's memory grows with the bytes that came and not with what its header claims.
"""

from __future__ import annotations

from kvstore.errors import FrameTooLarge
from kvstore.protocol import frames


class Inbox:
    """One connection's."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = 0  # of what was not taken yet

    def __len__(self) -> int:
        return len(self._data) - self._start

    def received(self, data: memoryview) -> None:
        """These bytes came; they are copied."""
        del self._data[: self._start]
        self._start = 0
        self._data += data

    def frame_bytes(self) -> int:
        """How long the next frame is, header included; 0 if that is not known yet. Raises FrameTooLarge."""
        if len(self) < frames.HEADER_BYTES:
            return 0
        size: int = frames.HEADER.unpack_from(self._data, self._start)[0]
        if size > frames.FRAME_BYTES_MAX:
            raise FrameTooLarge(size, frames.FRAME_BYTES_MAX)
        return frames.HEADER_BYTES + size

    def tag(self) -> int:
        """The tag of the next frame, which is here as a whole; 0 for what is no message."""
        at = self._start + frames.HEADER_BYTES + 1
        return self._data[at] if at < len(self._data) else 0

    def take(self, frame_bytes: int) -> memoryview:
        """The payload of the next frame, which is here as a whole; valid until more bytes come."""
        payload = memoryview(self._data)[self._start + frames.HEADER_BYTES : self._start + frame_bytes]
        self._start += frame_bytes
        if not len(self):
            self.clear()
        return payload

    def clear(self) -> None:
        """Forget everything; what comes now is ignored."""
        self._data, self._start = bytearray(), 0
