"""A block's tiers, slot and pins share one number and do not disturb each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon.config.config import DRAM_CAPACITY_BYTES_MAX
from kvstore.index.block import NO_SLOT, PIN, ROOTED, SLOT_MAX, Block
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from tiers.constants import SLAB_ALIGN_BYTES
from tiers.namespace_spec import NamespaceSpec
from tiers.slots import SLAB_SLOTS_MAX

STEPS = st.one_of(
    st.tuples(st.just("slot"), st.one_of(st.just(NO_SLOT), st.integers(0, SLOT_MAX))),
    st.tuples(st.sampled_from(["come", "go"]), st.sampled_from([IN_DRAM, IN_NVME, ROOTED])),
    st.tuples(st.sampled_from(["pin", "unpin"]), st.just(0)),
)


@given(st.lists(STEPS))
def test_one_number_holds_three(steps: list[tuple[str, int]]) -> None:
    """Whatever comes, goes and is pinned: each of the three is what it was set to last."""
    block = Block(NamespaceRegistry().register(NamespaceSpec(bytes(16), 1, 8)), b"h")
    tiers, slot, pins = 0, NO_SLOT, 0
    for step, value in steps:
        if step == "slot":
            block.put_in(value)
            slot = value
        elif step == "come":
            block.where |= value
            tiers |= value
        elif step == "go":
            block.where &= ~value
            tiers &= ~value
        elif step == "pin" or pins:
            block.where += PIN if step == "pin" else -PIN
            pins += 1 if step == "pin" else -1
        assert (block.where & (IN_ANY | ROOTED), block.slot, block.pins) == (tiers, slot, pins)
        assert (block.where >= PIN) == (pins > 0)


def test_every_slot_of_the_largest_arena_fits() -> None:
    """Slots are numbered by slab, and slabs may be as small as is allowed."""
    assert DRAM_CAPACITY_BYTES_MAX // SLAB_ALIGN_BYTES * SLAB_SLOTS_MAX - 1 <= SLOT_MAX
