"""Pinning: the arena is registered once, in the background, and undone before it is unmapped."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch

from connectors.device import blocks_of, pinning
from connectors.device.accelerator import AcceleratorMover
from connectors.device.driver import DriverError
from connectors.device.pinning import Pinning, WeightPins
from connectors.transfer.arena_keeper import ArenaKeeper
from kvstore.client import Unavailable
from kvstore.client.arena_view import ArenaView
from tests.device.arenas import arena, arena_file, map_file
from tests.device.simulated import SimulatedDriver

SIZE = 1 << 20
PIECE = 64 << 10


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    monkeypatch.setattr(pinning, "PIN_PIECE_BYTES", PIECE)
    return SimulatedDriver(seed=1, device=3)


class FakeLine:
    """A line whose daemon serves `serves`; it keeps the arena until it is asked again, as a client does."""

    def __init__(self, serves: Callable[[], ArenaView]) -> None:
        self.serves, self.kept = serves, None

    def refresh(self) -> ArenaView:
        self.kept = self.serves()
        return self.kept


@pytest.fixture
def warnings() -> list[str]:
    return []


def in_thread(work: Callable[[], object]) -> None:
    """Run it in a new thread, which is on device 0 as every new thread is; raise what it raised."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_an_arena_is_registered_once(driver: SimulatedDriver, warnings: list[str]) -> None:
    """However often the daemon is asked, each byte of its arena is registered once, in one mapping."""
    fd = arena_file(SIZE)
    pins = Pinning(driver, warnings.append)
    line = FakeLine(lambda: map_file(fd, SIZE))
    keeper = ArenaKeeper(line, pins, pytest.fail)  # type: ignore[arg-type]  # fakes with what it needs
    in_thread(keeper.refresh)
    in_thread(keeper.refresh)
    assert driver.registrations == SIZE // PIECE
    assert sum(driver.registered.values()) == SIZE
    assert not warnings and driver.touched_devices == {3}
    pins.close()
    assert not driver.registered
    os.close(fd)


def test_a_replaced_arena_is_unregistered_and_then_unmapped(driver: SimulatedDriver) -> None:
    """An idle process lets go of an arena that was replaced, and never unmaps registered memory."""
    unmapped_registered: list[bool] = []
    current = [arena(SIZE)]
    first = current[0]
    address, gone = first.address, weakref.ref(first.mapping)
    weakref.finalize(first.mapping, lambda: unmapped_registered.append(driver.is_registered(address, SIZE)))
    pins = Pinning(driver, pytest.fail)  # type: ignore[arg-type]  # any warning fails the test
    line = FakeLine(lambda: current[0])
    keeper = ArenaKeeper(line, pins, pytest.fail)  # type: ignore[arg-type]  # as above
    in_thread(keeper.refresh)
    held = first.view(0, 16)  # a lease that was just given back
    current[0] = arena(SIZE)
    del first
    in_thread(keeper.refresh)
    del held
    assert gone() is None and unmapped_registered == [False]
    assert set(driver.registered) == set(range(line.kept.address, line.kept.address + SIZE, PIECE))  # type: ignore[union-attr]  # refreshed
    pins.close()


def test_a_lease_in_hand_keeps_its_arena_registered(driver: SimulatedDriver) -> None:
    """While somebody still copies through a replaced arena, nothing is unregistered under the copy."""
    current = [arena(SIZE)]
    lease_of = current[0]
    pins = Pinning(driver, pytest.fail)  # type: ignore[arg-type]  # any warning fails the test
    keeper = ArenaKeeper(FakeLine(lambda: current[0]), pins, pytest.fail)  # type: ignore[arg-type]  # fakes
    keeper.refresh()
    current[0] = arena(SIZE)
    keeper.refresh()
    assert driver.is_registered(lease_of.address, SIZE)
    pins.close()


def test_a_refused_registration_leaves_no_error_behind(driver: SimulatedDriver, warnings: list[str]) -> None:
    """Where the driver refuses, one line says so, nothing stays registered, and the next call succeeds."""
    driver.refuse["register"] = 0.4
    pins = Pinning(driver, warnings.append)
    view = arena(SIZE)
    for _ in range(3):
        pins.pin(view)
    assert len(warnings) == 1 and "slower" in warnings[0]
    assert not driver.registered
    driver.set_device()
    driver.mark()  # reports a pending error, if there is one


def test_a_thread_is_put_on_its_device(driver: SimulatedDriver) -> None:
    """A new thread copies on the device of its rank, and no context is made on another one."""
    cache = torch.zeros((8, 1, 1, 64), dtype=torch.uint8)
    mover = AcceleratorMover(blocks_of([cache], 8), driver, Pinning(driver, print))
    mark = mover.mark()
    in_thread(lambda: mover.load([1], [memoryview(bytes([7]) * 64)], mark))
    in_thread(lambda: mover.save([1], [memoryview(bytearray(64))], mark))
    assert cache[1].eq(7).all() and driver.touched_devices == {3}


def test_copies_are_cut_where_registered_pieces_meet(driver: SimulatedDriver) -> None:
    """Records that lie across the border of two registered pieces arrive whole."""
    cache = torch.randint(0, 255, (8, 3, 1, 9000), dtype=torch.uint8)
    before = cache.clone()
    view = arena(SIZE)
    pins = Pinning(driver, pytest.fail)  # type: ignore[arg-type]  # any warning fails the test
    driver.set_device()
    pins.pin(view)
    mover = AcceleratorMover(blocks_of([cache], 8), driver, pins)
    size = mover.record_bytes
    records = [view.view(PIECE - size // 2 + number * size, size) for number in range(8)]
    mover.save(range(8), records, mover.mark())
    cache.zero_()
    mover.load(range(8), records, mover.mark())
    assert torch.equal(cache, before) and not driver.pageable_copies
    pins.close()


def test_a_failed_batch_is_waited_for(driver: SimulatedDriver) -> None:
    """When a copy fails half-way, what was under way has ended when the error is raised."""
    cache = torch.full((64, 1, 1, 64), 9, dtype=torch.uint8)
    mover = AcceleratorMover(blocks_of([cache], 64), driver, Pinning(driver, print))
    mark = mover.mark()
    driver.refuse["copy"] = 1.0
    for _ in range(20):
        slots = bytearray(64 * 64)
        records = [memoryview(slots)[64 * number : 64 * number + 64] for number in range(64)]
        driver.set_device()
        with pytest.raises(DriverError):
            mover.save(range(64), records, mark)
        slots[:] = bytes(len(slots))  # the lease was given back: the slots are somebody else's
        driver.finish()
        assert slots == bytes(len(slots)), "a late copy landed in a slot that was given back"


def test_a_daemon_that_is_away_is_asked_again(driver: SimulatedDriver) -> None:
    """A daemon that does not answer does not stop the next round."""
    view = arena(SIZE)
    answers = iter([Unavailable("planted"), view])

    def serves() -> ArenaView:
        if isinstance(answer := next(answers), Unavailable):
            raise answer
        return answer

    pins = Pinning(driver, pytest.fail)  # type: ignore[arg-type]  # any warning fails the test
    keeper = ArenaKeeper(FakeLine(serves), pins, pytest.fail)  # type: ignore[arg-type]  # fakes
    keeper.refresh()
    assert not driver.registered
    keeper.refresh()
    assert sum(driver.registered.values()) == SIZE
    pins.close()


def test_weights_are_pinned_or_one_line_says_why_not(driver: SimulatedDriver, warnings: list[str]) -> None:
    """By any thread; a refusal leaves no error for the engine's next call, and is not asked for again."""
    view, pins = arena(SIZE), WeightPins(driver, warnings.append)

    def pin() -> None:
        assert pins.pin(view.address, SIZE) and driver.is_registered(view.address, SIZE)
        pins.landed()
        pins.unpin(view.address)
        assert not driver.is_registered(view.address, SIZE)
        driver.refuse["register"] = 1.0
        assert not pins.pin(view.address, SIZE) and driver.take_error() == 0
        driver.refuse.clear()
        assert not pins.pin(view.address, SIZE)

    in_thread(pin)
    assert len(warnings) == 1 and "slower" in warnings[0]
