"""Blocks of an accelerator, saved to a daemon's arena and loaded from there, while the engine goes on computing."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from connectors.device import blocks_of
from connectors.device.accelerator import AcceleratorMover
from connectors.device.pinning import Pinning
from connectors.transfer.arena_keeper import ArenaKeeper
from connectors.transfer.copies import Loads, Saves
from connectors.transfer.link import Line
from connectors.transfer.orders import Column, Load, LoadEnd, Save
from kvstore.client import Client
from tests.device.simulated import SimulatedDriver
from tests.running import Daemon, Place
from tiers.dram.pages import SHM

BLOCKS, LAYERS, RUN_BYTES, RECORDS, ROUNDS = 48, 4, 16 << 10, 16, 12


def simulated() -> tuple[Any, str]:
    return SimulatedDriver(seed=5), "cpu"


def real() -> tuple[Any, str]:
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    from tests.device.real import RealDriver

    return RealDriver(seed=5), "cuda:0"


class Engine:
    """What a rank has: blocks, of which the first half is computed while the other half is copied."""

    def __init__(self, driver: Any, device: str) -> None:
        self.driver, self.draw = driver, random.Random(7)
        self.cache = torch.zeros((LAYERS, BLOCKS, 1, 1, RUN_BYTES), dtype=torch.uint8, device=device)
        self.stop = threading.Event()
        self.steps = 0

    def fill(self, block: int, seed: int) -> None:
        """On its stream, some time from now."""
        rows = self.content(seed).to(self.cache.device)
        self.driver.compute(lambda: self.cache[:, block].copy_(rows))

    def content(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (LAYERS, 1, 1, RUN_BYTES), generator=generator, dtype=torch.uint8)

    def compute(self) -> None:
        """In a thread of its own: never a block that is copied."""
        self.driver.set_device()
        while not self.stop.is_set():
            self.fill(self.steps % (BLOCKS // 2), self.steps)
            self.steps += 1
            if not self.steps % 4:
                self.driver.finish()


@pytest.fixture
def shm() -> Iterator[str]:
    """Drivers pin memory, and no pages of a disk's files."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        yield directory


@pytest.mark.parametrize("machine", [simulated, real])
def test_blocks_come_back_from_a_daemon_while_the_engine_computes(
    machine: Callable[[], tuple[Any, str]], place: Place, serve: Callable[..., Daemon], shm: str
) -> None:
    """Every byte of them, through an arena that another process owns and that this one has pinned."""
    engine = Engine(*machine())
    driver, errors = engine.driver, list[BaseException]()
    driver.set_device()
    serve(place, *place.arguments, f"--set=dram.directory={shm}")
    pins = Pinning(driver, pytest.fail)  # type: ignore[arg-type]  # any warning fails the test
    mover = AcceleratorMover(blocks_of(list(engine.cache), BLOCKS), driver, pins)

    def note(_: str, error: BaseException) -> None:
        errors.append(error)

    loads, saves, numbers = Loads({0: mover}, note), Saves({0: mover}, note), count(1)
    line = Line(str(place.socket), 10.0, "rank", attach=True, writable=True)
    ArenaKeeper(line, pins, note).refresh()
    assert sum(driver.registered.values()) == 16 << 20
    thread = threading.Thread(target=engine.compute)
    thread.start()
    with Client(place.socket, label="scheduler", attach=False) as scheduler:
        space = scheduler.namespace(bytes(16), mover.record_bytes, 32, 16, {"model": "m"})
        try:
            for round_number in range(ROUNDS):
                blocks = engine.draw.sample(range(BLOCKS // 2, BLOCKS), RECORDS)
                hashes = [engine.draw.randbytes(32) for _ in blocks]
                seeds = [(round_number + 1) * 1000 + number for number in range(RECORDS)]
                for block, seed in zip(blocks, seeds, strict=True):
                    engine.fill(block, seed)
                lease = scheduler.reserve_slots(space, hashes)
                save = Save(next(numbers), 0, blocks, lease.grant, None)
                task = saves.begin(save, Column(0, 0))
                assert task is not None
                saves.run(line, [task])
                assert saves.take_reports() == {save.number: (RECORDS, True)} and not errors
                engine.draw.shuffle(blocks)  # into others than they came from, with other content
                for block in blocks:
                    engine.fill(block, 1)
                read = scheduler.acquire_slots(space, hashes, 5.0)
                load = Load(next(numbers), 0, blocks, read.grant, None, "r", sync=False)
                coming = loads.begin(load, Column(0, 0), 0)
                assert coming is not None
                loads.run(line, coming)
                loads.end(LoadEnd("r", False), 0)
                read.release()
                assert loads.take_reports() == {load.number: RECORDS} and not errors
                assert [finished.missing for finished in loads.take_finished()] == [set()]
                for block, seed in zip(blocks, seeds, strict=True):
                    assert torch.equal(engine.cache[:, block].cpu(), engine.content(seed))
        finally:
            engine.stop.set()
            thread.join()
    driver.finish()
    pins.close()
    line.close()
    assert engine.steps > ROUNDS and not driver.registered
