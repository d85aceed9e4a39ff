"""Windows: what groups that need only the end of a prefix are promised, by the same rules as a prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.constants import STEP_BLOCKS
from kvstore.engine import windows
from kvstore.engine.engine import Engine
from kvstore.engine.windows import Asked
from kvstore.errors import BadRequest
from kvstore.ledger.accounts import Asking
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.steps import finish
from tests.engine import test_persisting
from tests.engine.fakes import held
from tests.engine.test_persisting import prompt
from tests.engine.test_retention import RECORD_BYTES, Node, joined
from tests.engine.test_shared_levels import Node as SharedNode
from tests.engine.test_shared_levels import hashes, name
from tiers.namespace_spec import NamespaceSpec

NAMES = [f"b{number}" for number in range(12)]


def find(
    engine: Engine,
    groups: list[tuple[int, int]],
    asked: bytes,
    block_tokens: int = 1,
    reach: int | None = None,
    asking: Asking | None = None,
) -> tuple[int, int]:
    """groups: namespaces and their windows in tokens; all blocks have the same size."""
    spaces = [(engine.namespaces.get(number), tokens) for number, tokens in groups]
    most = len(asked) // 8 * block_tokens
    reach = most if reach is None else reach
    return finish(
        windows.find_steps(
            engine, Asked(spaces, asked, block_tokens, block_tokens, most, reach, asking or Asking())
        )
    )


@pytest.fixture
def node() -> Iterator[Node]:
    """Eight records in DRAM, many on NVMe; blocks of one token."""
    made = Node(nvme_slots=64, slabs=1)
    yield made
    made.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedNode]:
    """A level that others use has 600 blocks of 16 tokens, the node nothing."""
    made = SharedNode(tmp_path / "arena")
    yield made
    made.close()


def test_a_window_needs_its_last_blocks_only(node: Node) -> None:
    """What lies before it may be gone; a hit ends where one group has all of its window."""
    node.put("b3", "b4", "b5", parent="b2")
    node.put("b4", parent="b3", space=1)
    first, second = node.spaces[:2]
    assert find(node.engine, [(first, 3)], joined(*NAMES)) == (6, 6)
    assert find(node.engine, [(first, 4)], joined(*NAMES)) == (0, 0)
    assert find(node.engine, [(first, 2), (second, 1)], joined(*NAMES)) == (5, 5)
    assert find(node.engine, [(first, 0)], joined(*NAMES)) == (12, 12)


def test_windows_are_found_from_any_gaps() -> None:
    """Of groups with blocks of several sizes, whatever they lack: as by trying every end."""
    chance, node = random.Random(1), Node(slabs=8)
    sizes = (2, 4, 2)  # of blocks; hashes are of two tokens
    specs = [NamespaceSpec(bytes([40 + n]) * 16, 1000, 8, size) for n, size in enumerate(sizes)]
    spaces = [node.engine.namespaces.get(node.engine.register(spec)) for spec in specs]
    for prompt_number in range(8):
        asked = [f"{prompt_number}-{number}" for number in range(40)]
        there: list[set[int]] = []
        for space, size in zip(spaces, sizes, strict=True):
            own = asked[size // 2 - 1 :: size // 2]
            there.append({at for at in range(len(own)) if chance.random() < 0.8})
            for at in there[-1]:
                parent = joined(own[at - 1]) if at else b""
                lease = node.engine.reserve(node.session, space.id, joined(own[at]), parent).lease
                node.engine.commit(node.session, lease, [0], bytes(16))
        for _ in range(40):
            needs = [chance.choice((1, 2, 7, 30)) for _ in sizes]
            expected = next(
                end
                for end in range(80, -1, -4)
                if all(
                    set(range(max(0, end - need) // size, end // size)) <= has
                    for need, size, has in zip(needs, sizes, there, strict=True)
                )
            )
            groups = list(zip(spaces, needs, strict=True))
            search = Asked(groups, joined(*asked), 2, 4, 80, 80, Asking())
            assert finish(windows.find_steps(node.engine, search)) == (expected, expected)
    node.close()


def test_what_another_stores_is_within_reach(node: Node) -> None:
    """Blocks that are being written make no hit, and are told: also where the other groups are still being written."""
    node.put("b0", "b1")
    node.engine.reserve(node.session, node.spaces[0], joined("b2", "b3"), joined("b1"))
    asked = joined(*NAMES)
    assert find(node.engine, [(node.spaces[0], 2)], asked) == (2, 4)
    spaces = [(node.space(0), 2)]
    assert finish(windows.find_steps(node.engine, Asked(spaces, asked, 1, 1, 1, 3, Asking()))) == (1, 3)


def test_a_window_over_its_ttl_is_no_hit(node: Node) -> None:
    """As soon as its time is over, and before it is swept."""
    node.put(*NAMES[:4])
    assert node.ttl(60.0) is None
    node.settle()
    assert find(node.engine, [(node.spaces[0], 2)], joined(*NAMES)) == (4, 4)
    node.clock_s += 61.0
    assert node.space(0).holds(joined("b3"))
    assert find(node.engine, [(node.spaces[0], 2)], joined(*NAMES)) == (0, 0)


def test_what_is_being_erased_is_no_hit(node: Node) -> None:
    """From the first hidden block on; of a long prompt it is looked for in steps."""
    node.put(*NAMES[:4])
    space = node.space(0)
    space.hide(joined("b2"))
    assert find(node.engine, [(space.id, 2)], joined(*NAMES)) == (2, 2)
    space.show(joined("b2"))
    assert find(node.engine, [(space.id, 2)], joined(*NAMES)) == (4, 4)
    asked = joined(*NAMES, *(f"y{number}" for number in range(4 * STEP_BLOCKS)))
    search = Asked([(space, 2)], asked, 1, 1, len(asked) // 8, len(asked) // 8, Asking())
    before = sum(1 for _ in windows.find_steps(node.engine, search))
    space.hide(joined("other"))
    assert sum(1 for _ in windows.find_steps(node.engine, search)) >= before + 4


def test_a_window_on_a_sick_device_is_no_hit(node: Node) -> None:
    """What is only there does not count while its breaker is open; the device is probed with it."""
    node.put(*NAMES[:4])
    node.settle(1.0)
    node.put(*(f"x{number}" for number in range(8)))  # takes all of DRAM
    node.settle(1.0)
    assert not any(block.where & IN_DRAM for block in node.space(0).blocks.get_run([joined("b3")]) if block)
    assert find(node.engine, [(node.spaces[0], 2)], joined(*NAMES)) == (4, 4)
    device = node.engine.loader.devices[0]
    device.loads._trip("the test says so")
    assert find(node.engine, [(node.spaces[0], 2)], joined(*NAMES)) == (0, 0)
    own = Asking(local_tokens=4)  # the engine has them itself, and loads none
    assert find(node.engine, [(node.spaces[0], 2)], joined(*NAMES), asking=own) == (4, 4)
    assert node.engine.counters.refused_unavailable == 1 and len(device.targets) > 0


def test_what_is_slower_to_load_than_to_compute_is_no_hit(node: Node) -> None:
    """All windows of a request are judged together; what is refused is measured again."""
    for space in (0, 1):
        node.put(*NAMES[:4], space=space)
        node.settle(1.0)
    node.put(*(f"x{number}" for number in range(8)), space=2)
    node.settle(1.0)
    device = node.engine.loader.devices[0]
    device.speed.latency_s, device.speed.bytes_per_s = 0.0, RECORD_BYTES  # a block a second
    groups = [(node.spaces[0], 2), (node.spaces[1], 2)]
    asking = Asking(prefill_tokens_per_s=4 / 3)
    assert find(node.engine, groups[:1], joined(*NAMES), asking=asking) == (4, 4)
    assert find(node.engine, groups, joined(*NAMES), asking=asking) == (0, 0)
    asking = asking._replace(local_tokens=3)  # of each group one block is loaded, instead of one token
    assert find(node.engine, groups, joined(*NAMES), asking=asking) == (3, 3)
    asking = asking._replace(prefill_tokens_per_s=0.5)
    assert find(node.engine, groups, joined(*NAMES), asking=asking) == (4, 4)
    assert node.engine.counters.refused_slower == 2 and device.refused


def test_a_window_comes_from_a_bucket(shared: SharedNode) -> None:
    """A node with empty tiers promises what the catalogue has, loads the window alone, and has it then."""
    groups = [(shared.space, 40)]
    assert find(shared.engine, groups, hashes(0, 700), 16) == (600 * 16, 600 * 16)
    answer = shared.acquire(597, 600)
    assert all(slot is not None for slot in held(answer))
    shared.engine.release(shared.session, answer.lease)
    assert find(shared.engine, groups, hashes(0, 600), 16) == (600 * 16, 600 * 16)
    shared.engine.loader.shared[0].loads._trip("the test says so")
    assert find(shared.engine, groups, hashes(0, 600), 16) == (600 * 16, 600 * 16)
    assert find(shared.engine, groups, hashes(0, 599), 16) == (0, 0)
    assert not shared.engine.namespaces.get(shared.space).holds(name(0))


def test_windows_are_persisted_as_prefixes_are(tmp_path: Path) -> None:
    """Each request counts once for every group; one of a model that a bucket cannot keep does not count."""
    node = test_persisting.Node(tmp_path / "arena")
    asked = prompt(*range(4))
    node.store(asked)

    def ask(ticket: int, lasting: bool = True) -> None:
        asking = Asking(ticket, lasting=lasting)
        assert find(node.engine, [(node.space, 200)], asked, 128, asking=asking) == (512, 512)

    for ticket in (1, 1):
        ask(ticket)
    for ticket in (2, 3):
        ask(ticket, lasting=False)
    node.persist()
    assert node.durable(asked) == 0
    ask(4)
    node.persist()
    assert node.durable(asked) == 4
    node.close()


def test_blocks_are_whole_hashes(node: Node) -> None:
    """Blocks that no hash ends with are refused, and so are hits that end inside a block."""
    with pytest.raises(BadRequest, match="a multiple of hash_tokens 2"):
        find(node.engine, [(node.spaces[0], 2)], bytes(8), 2)
