"""The seam between paged KV tensors and records: whole blocks, bit by bit, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import xxhash

from connectors.device import BlockMover, Blocks, blocks_of
from connectors.device.accelerator import AcceleratorMover
from connectors.device.cpu import CpuMover
from connectors.device.movers import movers_for
from connectors.device.pinning import Pinning
from tests.device.arenas import arena
from tests.device.simulated import SimulatedDriver

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 6
SHAPE = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
LAYOUTS = {  # physical order of the logical axes layer, block, head, token, content
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
RUNS = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def simulated(blocks: Blocks) -> BlockMover:
    """The mover for an accelerator, on one whose device memory is host memory."""
    driver = SimulatedDriver(seed=7)
    return AcceleratorMover(blocks, driver, Pinning(driver, print))


MOVERS: dict[str, Callable[[Blocks], BlockMover]] = {"threads": CpuMover, "simulated": simulated}


def paged(layout: str, seed: int) -> Any:
    """The logical [L, B, H, N, C] view of one buffer in this layout, filled with noise."""
    order = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    physical = torch.randint(
        -(1 << 30), 1 << 30, [SHAPE[axis] for axis in order], generator=generator, dtype=torch.int32
    )
    return physical.permute([order.index(axis) for axis in range(5)])


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_survive_a_round_trip(layout: str, mover: Callable[[Blocks], BlockMover]) -> None:
    """Blocks saved from one cache and loaded into other places of another are equal; no other block is touched."""
    source, target = paged(layout, 1), paged(layout, 2)
    before = target.clone()
    out, into = mover(blocks_of(list(source), BLOCKS)), mover(blocks_of(list(target), BLOCKS))
    assert out.record_bytes == LAYERS * HEADS * TOKENS * CONTENT * 4
    records = [memoryview(bytearray(out.record_bytes)) for _ in range(5)]
    digests = out.save([5, 0, 3, 6, 1], records, out.mark())
    assert digests == [xxhash.xxh3_128_digest(record) for record in records]
    into.load([1, 2, 3, 4, 6], [memoryview(bytes(record)) for record in records], into.mark())
    for here, there in zip([5, 0, 3, 6, 1], [1, 2, 3, 4, 6], strict=True):
        assert torch.equal(source[:, here], target[:, there])
    for untouched in (0, 5):
        assert torch.equal(target[:, untouched], before[:, untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_movers_make_the_same_records(layout: str) -> None:
    """What an engine with an accelerator stores, one without could load: the order inside a record is the same."""
    blocks = blocks_of(list(paged(layout, 3)), BLOCKS)
    plain, staged = memoryview(bytearray(blocks.record_bytes)), memoryview(bytearray(blocks.record_bytes))
    CpuMover(blocks).save([4], [plain], None)
    simulated(blocks).save([4], [staged], None)
    assert plain == staged


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_as_few_pieces_as_its_layout_allows(layout: str) -> None:
    """Block-outermost layouts give one contiguous piece a block, the others one for each layer (and head)."""
    assert len(blocks_of(list(paged(layout, 1)), BLOCKS).runs) == RUNS[layout]


def test_parts_of_a_block_travel_together() -> None:
    """A kernel that cuts the manager's blocks in two still has whole blocks moved."""
    source = paged("LBHNC", 1)
    halves = [layer.reshape(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) for layer in source]
    mover = CpuMover(blocks_of(halves, BLOCKS))
    record = memoryview(bytearray(mover.record_bytes))
    mover.save([3], [record], None)
    expected = b"".join(layer[6:8].contiguous().numpy().tobytes() for layer in halves)
    assert record == expected


def test_layers_in_storages_of_their_own() -> None:
    """Layers need not share a buffer; the order of a record is that of the layers, not of their addresses."""
    layers = [layer.clone() for layer in paged("LBHNC", 1)]
    forward, again = blocks_of(layers, BLOCKS), blocks_of([layer.clone() for layer in layers], BLOCKS)
    records = [memoryview(bytearray(forward.record_bytes)) for _ in range(2)]
    CpuMover(forward).save([2], records[:1], None)
    CpuMover(again).save([2], records[1:], None)
    assert records[0] == records[1] == b"".join(layer[2].numpy().tobytes() for layer in layers)


def test_a_shared_layer_is_stored_once() -> None:
    """Two layer names on one tensor make one piece."""
    layer = paged("LBHNC", 1)[0]
    assert blocks_of([layer, layer], BLOCKS).record_bytes == HEADS * TOKENS * CONTENT * 4


def test_what_is_not_whole_blocks_is_refused() -> None:
    """A tensor whose rows are no multiple of the blocks, or that overlaps itself, is no KV cache we can move."""
    layer = paged("LBHNC", 1)[0]
    with pytest.raises(ValueError, match="whole blocks"):
        blocks_of([layer], BLOCKS - 1)
    with pytest.raises(ValueError, match="overlap"):
        blocks_of([layer.as_strided(layer.shape, (48, 24, 3, 1))], BLOCKS)


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS.keys())
def test_a_record_of_the_wrong_size_is_refused(mover: Callable[[Blocks], BlockMover]) -> None:
    """Nothing is copied past the end of a record."""
    made = mover(blocks_of(list(paged("LBHNC", 1)), BLOCKS))
    with pytest.raises(ValueError, match="bytes"):
        made.save([1], [memoryview(bytearray(made.record_bytes - 4))], None)


def test_large_copies_are_shared_by_threads() -> None:
    """Above the threshold several threads copy, and the result is the same."""
    layer = torch.randint(0, 255, (16, 1, 1, 1 << 20), dtype=torch.uint8)
    target = torch.zeros_like(layer)
    out, into = CpuMover(blocks_of([layer], 16)), CpuMover(blocks_of([target], 16))
    records = [memoryview(bytearray(1 << 20)) for _ in range(16)]
    out.save(range(16), records, None)
    into.load(range(16), records, None)
    assert torch.equal(layer, target)


def test_pieces_that_cannot_be_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the batched copy is not allowed, the blocks are copied one by one and are the same."""
    monkeypatch.setattr("connectors.device.cpu._copy_pieces", lambda *_: -1)
    source, target = paged("LBHNC", 1), paged("LBHNC", 2)
    out, into = CpuMover(blocks_of(list(source), BLOCKS)), CpuMover(blocks_of(list(target), BLOCKS))
    records = [memoryview(bytearray(out.record_bytes)) for _ in range(BLOCKS)]
    out.save(range(BLOCKS), records, None)
    into.load(range(BLOCKS), records, None)
    assert torch.equal(source, target)


def test_host_tensors_get_the_threaded_mover() -> None:
    """The device decides: on host memory there are no streams, and nothing is pinned."""
    movers, pinning = movers_for({0: blocks_of(list(paged("BLHNC", 1)), BLOCKS)}, print)
    assert isinstance(movers[0], CpuMover) and pinning is None


def test_a_device_that_nobody_knows_is_refused() -> None:
    """KV tensors on another kind of device are declined in one line, not copied by guess."""
    blocks = blocks_of([torch.empty((BLOCKS, 1, 4, 8), device="meta")], BLOCKS)
    with pytest.raises(ValueError, match="meta"):
        movers_for({0: blocks}, print)


@pytest.mark.vllm
def test_these_are_all_of_vllms_layouts() -> None:
    """A layout that a newer vLLM adds is missed here, not in production."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert {layout.name: layout.value for layout in KVCacheLayout} == LAYOUTS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_on_an_accelerator(layout: str) -> None:
    """The same round trip through side streams and a registered arena."""
    source, target = paged(layout, 1).cuda(), paged(layout, 2).cuda()
    movers, pinning = movers_for(
        {0: blocks_of(list(source), BLOCKS), 1: blocks_of(list(target), BLOCKS)}, print
    )
    assert pinning is not None
    view = arena(movers[0].record_bytes * BLOCKS)
    pinning.pin(view)
    size = movers[0].record_bytes
    records = [view.view(size * number, size) for number in range(BLOCKS)]
    digests = movers[0].save(range(BLOCKS), records, movers[0].mark())
    assert digests == [xxhash.xxh3_128_digest(record) for record in records]
    movers[1].load(range(BLOCKS), records, movers[1].mark())
    torch.cuda.synchronize()
    pinning.close()
    assert torch.equal(source, target)
