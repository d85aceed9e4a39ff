"""Inbox: the bytes that one peer sent, and the frames in them.

    socket ─▶ shared receive buffer ─▶ what is not a whole frame yet, or not served: `_data`
    socket ─▶ `_data` itself, while a frame larger than one read is being collected

A frame's memory grows with the bytes that came and not with what its header claims.
"""

from __future__ import annotations

from kvstore import constants
from kvstore.errors import FrameTooLarge
from kvstore.protocol import frames


class Inbox:
    """One connection's. `shared`: where one read lands; the same for all connections of a loop."""

    def __init__(self, shared: memoryview) -> None:
        self._shared = shared
        self._data = bytearray()
        self._start = 0  # of what was not taken yet
        self._end = 0
        self._large_bytes = 0  # of the frame being collected in place, header included
        self._in_place = False  # whether the bytes under way are put into `_data`

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def is_collecting(self) -> bool:
        """Whether a large frame is being collected, or waits to be taken."""
        return self._large_bytes > 0

    def buffer(self) -> memoryview:
        """Where the next bytes are to be put."""
        self._in_place = self._end < self._large_bytes
        return memoryview(self._data)[self._end :] if self._in_place else self._shared

    def received(self, count: int) -> None:
        """So many bytes were put into `buffer`."""
        if not self._in_place:
            # New memory: the event loop may still hold a view of the old one.
            self._data = self._data[self._start : self._end] + self._shared[:count]
            self._start, self._end = 0, len(self._data)
            return
        self._end += count
        if self._end == len(self._data) < self._large_bytes:
            grown = bytearray(min(self._large_bytes, 2 * self._end))
            grown[: self._end] = self._data
            self._data = grown

    def frame_bytes(self) -> int:
        """How long the next frame is, header included; 0 if that is not known yet. Raises FrameTooLarge."""
        if len(self) < frames.HEADER_BYTES:
            return 0
        size: int = frames.HEADER.unpack_from(self._data, self._start)[0]
        if size > frames.FRAME_BYTES_MAX:
            raise FrameTooLarge(f"frame of {size} bytes: at most {frames.FRAME_BYTES_MAX} are allowed")
        return frames.HEADER_BYTES + size

    def tag(self) -> int:
        """The tag of the next frame, which is here as a whole; 0 for what is no message."""
        at = self._start + frames.HEADER_BYTES + 1
        return self._data[at] if at < self._end else 0

    def collect(self, frame_bytes: int) -> None:
        """The next frame is larger than one read: its bytes are put in place from now on."""
        have = len(self)
        collected = bytearray(min(frame_bytes, max(2 * have, constants.DOOR_FRAME_START_BYTES)))
        collected[:have] = memoryview(self._data)[self._start : self._end]
        self._data, self._start, self._end = collected, 0, have
        self._large_bytes = frame_bytes

    def take(self, frame_bytes: int) -> memoryview:
        """The payload of the next frame, which is here as a whole."""
        payload = memoryview(self._data)[self._start + frames.HEADER_BYTES : self._start + frame_bytes]
        self._start += frame_bytes
        self._large_bytes = 0
        if self._start == self._end:
            self._data, self._start, self._end = bytearray(), 0, 0
        return payload

    def clear(self) -> None:
        """Forget everything; what comes now is ignored."""
        self._data, self._start, self._end, self._large_bytes = bytearray(), 0, 0, 0
