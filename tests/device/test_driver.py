"""What our copies expect of an accelerator's runtime: the real one, where there is one, and the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from connectors.device.driver import Driver
from tests.device.arenas import arena
from tests.device.simulated import SimulatedDriver

SIZE = 1 << 20
HALF = SIZE // 2


@dataclass
class Machine:
    """A driver, memory of its device, and its engine's way to give it work."""

    driver: Driver
    memory: Any
    compute: Callable[[Callable[[], Any]], None]

    def copy(self, stream: Any, source: int, target: int, size_bytes: int) -> None:
        self.driver.copy(
            stream, *(np.array([number], dtype=np.int64) for number in (source, target, size_bytes))
        )


def simulated() -> Machine:
    driver = SimulatedDriver(seed=3)
    return Machine(driver, torch.zeros(SIZE, dtype=torch.uint8), driver.compute)


def real() -> Machine:
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    from tests.device.real import RealDriver

    driver = RealDriver(seed=3)
    return Machine(driver, torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0"), driver.compute)


@pytest.fixture(params=[simulated, real], ids=["simulated", "real"])
def machine(request: pytest.FixtureRequest) -> Machine:
    made: Machine = request.param()
    made.driver.set_device()
    return made


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
def test_a_shared_mapping_can_be_registered(machine: Machine, writable: bool) -> None:
    """An arena is shared memory of the daemon; a consumer's mapping of it cannot be written."""
    view = arena(SIZE, writable)
    assert machine.driver.register(view.address, SIZE, writable) == 0
    assert machine.driver.unregister(view.address) == 0
    assert machine.driver.take_error() == 0


def test_memory_is_registered_once(machine: Machine) -> None:
    """The second time is refused, and the refusal is pending until it is taken."""
    driver, view = machine.driver, arena(SIZE)
    assert driver.register(view.address, SIZE, True) == 0
    code = driver.register(view.address, SIZE, True)
    assert code and driver.take_error() == code
    assert driver.take_error() == 0
    driver.mark()
    assert driver.unregister(view.address) == 0


def test_what_is_not_registered_cannot_be_unregistered(machine: Machine) -> None:
    """It is refused, and once the refusal was taken nothing of it is left."""
    driver, view = machine.driver, arena(SIZE)
    code = driver.unregister(view.address)
    assert code and driver.take_error() == code
    driver.mark()


def test_pieces_that_touch_are_registered_one_by_one(machine: Machine) -> None:
    """A large arena is pinned in pieces; a copy inside of each is right."""
    driver, view = machine.driver, arena(SIZE)
    view.view(0, SIZE)[:] = bytes(range(256)) * (SIZE // 256)
    for start in (0, HALF):
        assert driver.register(view.address + start, HALF, True) == 0
    stream = driver.new_stream()
    for start in (0, HALF):
        machine.copy(stream, view.address + start, machine.memory.data_ptr() + start, HALF)
    driver.synchronize(stream)
    assert bytes(machine.memory.cpu().numpy()) == bytes(view.view(0, SIZE))
    for start in (0, HALF):
        assert driver.unregister(view.address + start) == 0


def test_a_copy_across_the_end_of_registered_memory_is_refused(machine: Machine) -> None:
    """Why copies are cut at the edges of the pieces."""
    driver, view = machine.driver, arena(SIZE)
    assert driver.register(view.address, HALF, True) == 0
    stream = driver.new_stream()
    with pytest.raises(RuntimeError):
        machine.copy(stream, view.address + HALF - 4096, machine.memory.data_ptr(), 8192)
    driver.take_error()
    assert driver.unregister(view.address) == 0
    driver.mark()


def test_a_copy_waits_for_what_the_engine_gave_before(machine: Machine) -> None:
    """A block that is still being computed is saved as it will be."""
    driver, view = machine.driver, arena(SIZE)
    assert driver.register(view.address, SIZE, True) == 0
    stream = driver.new_stream()
    machine.compute(lambda: machine.memory.fill_(7))
    driver.wait(stream, driver.mark())
    machine.copy(stream, machine.memory.data_ptr(), view.address, SIZE)
    done = driver.record(stream)
    driver.synchronize(done)
    assert set(bytes(view.view(0, SIZE))) == {7}
    assert driver.unregister(view.address) == 0


def test_memory_that_is_not_registered_is_copied_all_the_same(machine: Machine) -> None:
    """Until the arena is pinned copies are slower, and right."""
    driver, view = machine.driver, arena(SIZE)
    view.view(0, SIZE)[:] = bytes([9]) * SIZE
    stream = driver.new_stream()
    machine.copy(stream, view.address, machine.memory.data_ptr(), SIZE)
    driver.synchronize(stream)
    assert int(machine.memory.sum()) == 9 * SIZE
