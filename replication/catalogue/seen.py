"""Seen: which packs of a catalogue a listing has shown, by their numbers: a bit each."""

from __future__ import annotations


class Seen:
    """A set of numbers, most of which are neighbours: a bit each, in pieces."""

    _PIECE = 1 << 16

    def __init__(self) -> None:
        self._pieces: dict[int, bytearray] = {}

    def add(self, number: int) -> None:
        piece, bit = divmod(number, self._PIECE)
        bits = self._pieces.get(piece)
        if bits is None:
            bits = self._pieces[piece] = bytearray(self._PIECE // 8)
        bits[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, number: int) -> bool:
        piece, bit = divmod(number, self._PIECE)
        bits = self._pieces.get(piece)
        return bits is not None and bool(bits[bit >> 3] & 1 << (bit & 7))
