"""Memory that weights are copied out of to a device, registered with its driver meanwhile: such copies are six times faster.

    file 0  │ pin │ tensors are given back, and copied │ unpin │
    file 1        │ pin │                              │ tensors … │ unpin │          in threads of their own

A copy may lie inside of one registered range, or outside of all: so ranges are whole files, whose pages no other file shares, or the
whole ring. From registered memory copies may go on behind the call that began them; so before bytes are given to others
`landed` is waited for.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tiers.copying import Pinned


class Pins(Protocol):
    """The driver of the device that this process copies to; `connectors.device.pinning.WeightPins`. Called by any thread."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """Register memory, read-only; False where it is refused: copies are slower then, and nothing else. Never raises."""

    def unpin(self, address: int) -> None:
        """What was registered from there on. Never raises."""

    def landed(self) -> None:
        """Wait until no copy to the device is under way."""


def ahead(pins: Pins | None, views: Sequence[memoryview]) -> Generator[None, None, None]:
    """Gives back one None for each of the views, once it is registered; until the next one is asked for it stays so."""
    if pins is None:
        yield from [None] * len(views)
        return
    there = set[int]()
    coming, leaving = (ThreadPoolExecutor(1, "kvstore-pins") for _ in range(2))

    def pin(address: int, size_bytes: int) -> None:
        if size_bytes and pins.pin(address, size_bytes):
            there.add(address)

    def unpin(address: int) -> None:
        if address in there:
            there.discard(address)
            leaving.submit(pins.unpin, address)

    addresses = list(map(address_of, views))
    pinned = [coming.submit(pin, *each) for each in zip(addresses, map(len, views), strict=True)]
    try:
        for address, future in zip(addresses, pinned, strict=True):
            future.result()
            yield None
            pins.landed()
            unpin(address)
    finally:
        coming.shutdown(cancel_futures=True)
        pins.landed()
        for address in list(there):
            unpin(address)
        leaving.shutdown()


def address_of(view: memoryview) -> int:
    pinned = Pinned(view)
    address = pinned.address
    pinned.release()
    return address
