"""Policies: what every one of them must do, and what makes each of them itself."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvstore.index.prompts import Prompt
from kvstore.index.stretch import Stretch
from kvstore.policies.base import Policies
from kvstore.policies.learned import Judged, Learned
from kvstore.policies.learned.experts import Frequent, Judge, Loyal, Youngest, all_judges
from kvstore.policies.learned.hazard import (
    AGE_STARTS,
    EVERY_HASH,
    KINDS,
    RELATIVES_OF,
    USES_GROUP_OF,
    USES_GROUPS,
    Reuse,
    chances,
    kind_of,
    kind_of_last,
)
from kvstore.policies.learned.leaves import REUSE_STALE_ENTRIES_MIN, Leaves
from kvstore.policies.learned.selection import CONTEST_LEFT_AT_ONCE, Contest, Shadow
from kvstore.steps import finish
from kvstore.tools.replay.cell import Node
from kvstore.tools.replay.policies import POLICIES
from kvstore.tools.replay.policies.arc import Arc
from kvstore.tools.replay.policies.lfu import Lfu
from kvstore.tools.replay.policies.s3fifo import S3Fifo
from kvstore.tools.replay.policies.sieve import Sieve

HASH_BYTES = 8


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def chain(number: int, length: int) -> bytes:
    """A prompt of its own: no two chains share a block."""
    return hashes(*(number * 1000 + depth for depth in range(length)))


def held(node: Node, prompt: bytes) -> int:
    return sum(map(bool, finish(node.engine.residency_steps(node.space, prompt))))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_books_balance_under_every_policy(name: str) -> None:
    """Random prompts with shared beginnings: never more blocks than slots, and the books balance."""
    rng = random.Random(5)
    node = Node(40, POLICIES[name]())
    for step in range(600):
        shared, own = rng.randint(0, 3), rng.randint(1, 30)
        prompt = chain(shared, rng.randint(1, 5)) + chain(10 + own, rng.randint(0, 9))
        node.ask(float(step), prompt)
        blocks = node.engine.namespaces.get(node.space).blocks.values()
        assert sum(bool(block.where) for block in blocks) <= 40
    assert node.engine.check() == []
    assert node.engine.counters.evicted_dram > 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_pinned_blocks_are_no_victims(name: str) -> None:
    """With everything leased a new block finds no room; after the release it does."""
    node = Node(4, POLICIES[name]())
    node.ask(1.0, chain(1, 4))
    answers = []
    node.engine.acquire(node.session, node.space, chain(1, 4), answers.append)
    assert not node.engine.reserve(node.session, node.space, chain(2, 1), b"").lease
    node.engine.release(node.session, answers[0].lease)
    assert held(node, chain(1, 4)) == 4


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_small_working_set_stays(name: str) -> None:
    """What fits and is asked for again and again is hit, whatever the policy."""
    node = Node(64, POLICIES[name]())
    found = [node.ask(float(n), chain(n % 4, 8)) for n in range(200)]
    assert all(hits == 8 for hits in found[40:])


def test_arc_moves_its_border_to_where_ghosts_return() -> None:
    """Blocks used once that come back after they left make the recent side larger."""
    arc = Arc(1)
    node = Node(16, Policies(lambda _: arc))
    for number in range(6):
        node.ask(0.0, chain(number % 2, 4))
    for number in range(40):
        node.ask(1.0, chain(10 + number % 3, 4))
    assert arc._target > 0


def test_s3fifo_lets_one_hit_wonders_pass() -> None:
    """A long scan does not push out what was used twice."""
    node = Node(50, Policies(S3Fifo))
    for _ in range(3):
        node.ask(0.0, chain(1, 10))
    for number in range(100):
        node.ask(1.0, chain(10 + number, 1))
    assert held(node, chain(1, 10)) == 10


def test_sieve_spares_what_was_used_since_the_hand_passed() -> None:
    """Of blocks that came together, the used one outlives the others."""
    node = Node(8, Policies(Sieve))
    for number in range(8):
        node.ask(0.0, chain(number, 1))
    node.ask(1.0, chain(0, 1))
    for number in range(20, 26):
        node.ask(2.0, chain(number, 1))
    assert held(node, chain(0, 1)) == 1
    assert held(node, chain(1, 1)) == 0


def test_lfu_remembers_those_who_left() -> None:
    """A block that was used often, and left, is worth more when it comes back than one used once."""
    node = Node(2, Policies(Lfu))
    for _ in range(5):
        node.ask(0.0, chain(1, 1))
    for number in range(2, 9):
        node.ask(1.0, chain(number, 1))
    assert held(node, chain(1, 1)) == 1


def test_kinds_have_the_relatives_they_are_listed_under() -> None:
    """Every history has a kind, kinds of the same uses are relatives, and so are all last blocks."""
    seen = set()
    for uses in range(1, 256):
        last = kind_of_last(uses)
        assert RELATIVES_OF[last] == USES_GROUPS
        for turn in range(1, 9):
            for blocks in (1, 5, 20, 100, 500, 5000):
                kind = kind_of(uses, turn, blocks)
                assert 0 <= kind < last < KINDS
                assert RELATIVES_OF[kind] == USES_GROUP_OF[kind] == USES_GROUP_OF[last]
                seen.add(RELATIVES_OF[kind])
    assert sorted(seen) == list(range(USES_GROUPS))


def test_unknown_traffic_is_treated_like_lru() -> None:
    """Before anything is learned the younger of two blocks is worth more, at every age."""
    reuse = Reuse()
    worth = []
    for age in [0, *AGE_STARTS]:
        reuse.now = int(age) + 1
        worth.append(reuse.density(kind_of(1, 1, 4), 0))
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > worth[-1]


def test_uses_long_ago_count_less() -> None:
    """A block used often and then not at all is of the kind of a block used rarely."""
    reuse = Reuse()
    space = Node(4, Learned()).engine.namespaces.get(0)
    prompt = Prompt(9)
    for _ in range(20):
        reuse.refused(space, [chain(1, 1)], prompt, 0)
    often = reuse.kind_of_new(space, chain(1, 1), prompt)
    reuse.now += 10**6
    later = reuse.kind_of_new(space, chain(1, 1), prompt)
    assert USES_GROUP_OF[often] > USES_GROUP_OF[later] == USES_GROUP_OF[kind_of(1, 1, 1)]


def test_chances_follow_the_evidence_and_the_prior_without_it() -> None:
    """No counts: the prior; many counts: what was counted."""
    ages = len(AGE_STARTS) + 1
    prior = [0.1] * ages
    assert chances([0.0] * ages, [0.0] * ages, prior, 100.0) == pytest.approx(prior)
    counted = chances([50_000.0] * ages, [100_000.0] * ages, prior, 100.0)
    assert counted == pytest.approx([0.5] * ages, abs=0.01)


def test_what_never_comes_back_is_learned_and_leaves_first() -> None:
    """One-time prompts and returning ones of another size: soon only the latter are kept."""
    node = Node(60, Learned())
    hits = 0
    for number in range(4000):
        now_s = float(number)
        node.ask(now_s, chain(100 + number, 20))  # never again
        hits += node.ask(now_s, chain(number % 25, 2))  # every 25 s
    assert hits > 0.9 * 2 * 4000


def test_a_sudden_change_of_traffic_is_learned() -> None:
    """What used to return stops returning and the other way round: hits recover."""
    node = Node(60, Learned())
    late = 0
    for number in range(12_000):
        swapped = number >= 6000
        once, again = (2, 20) if swapped else (20, 2)
        node.ask(float(number), chain(1000 + number, once))
        hits = node.ask(float(number), chain(number % (2 if swapped else 25), again))
        late += hits if number >= 10_000 else 0
    assert late > 0.9 * 20 * 2000


def test_the_last_partly_filled_block_is_its_own_kind() -> None:
    """Prompts whose last block never returns: that block is worth less than the others."""
    family = Learned()
    node = Node(400, family)
    for number in range(3000):
        full, rest = chain(number % 40, 8), hashes(10**6 + number)
        node.ask(float(number), full + rest)
    block = node.engine.namespaces.get(node.space).blocks[chain(2999 % 40, 1)]
    assert block.stretch is not None
    now = family.reuse.now
    last = family.reuse.density(kind_of_last(1), now)
    assert last < 0.1 * family.reuse.density(block.stretch.kind, now)


def test_blocks_refused_are_remembered_when_they_come_back() -> None:
    """A block that was not let in is known at its next visit."""
    reuse = Reuse()
    node = Node(4, Learned())
    space = node.engine.namespaces.get(node.space)
    prompt = Prompt(1)
    reuse.refused(space, [chain(1, 1)], prompt, 0)
    reuse.refused(space, [chain(1, 1)], prompt, 0)
    tally = reuse._tallies[kind_of(1, 1, 1)]
    assert sum(tally.used) == 1


def test_queues_stay_in_proportion_to_what_is_held() -> None:
    """Ten thousand uses of the same few prompts leave no more entries than they need."""
    made: list[Judged] = []
    family = Learned()

    def make(bit: int) -> Judged:
        made.append(Judged(bit, family))
        return made[-1]

    family.make = make
    node = Node(100, family)
    for number in range(10_000):
        node.ask(float(number), chain(number % 9, 4))
    assert len(made[0].leaves) <= REUSE_STALE_ENTRIES_MIN + 3 * 100


def stretch(uses: int, touched: int) -> Stretch:
    return Stretch(touched, kind_of(uses, 1, 8), uses, 1, 1)


@pytest.mark.parametrize(("judge", "first"), [(Youngest, "b"), (Frequent, "c"), (Loyal, "c")])
def test_judges_differ_about_the_same_leaves(judge: type[Judge], first: str) -> None:
    """The oldest leaves under one judge, the least used under the others; the judge may change at any time."""
    reuse = Reuse()
    leaves: Leaves[str] = Leaves(lambda item, stretch: True)
    for name, uses, touched in (("a", 30, 20), ("b", 4, 10), ("c", 1, 15)):
        leaves.push(name, stretch(uses, touched))
    reuse.now = 30
    for other in all_judges(reuse):
        leaves.cheapest(other)
    leaves.cheapest(judge())
    assert leaves.pop() == first


def test_a_shadow_is_the_cache_of_its_judge() -> None:
    """The shadow of LRU has the hits that the engine has under LRU."""
    rng = random.Random(3)
    shadow, node = Shadow(Youngest()), Node(30, POLICIES["lru"]())
    for number in range(800):
        head, depth = rng.randint(1, 3), rng.randint(1, 4)
        tail = chain(100 + 100 * head + 10 * depth + rng.randint(0, 6), rng.randint(0, 6))
        prompt = chain(head, depth) + tail
        use = stretch(1, number)
        keys = [prompt[at : at + HASH_BYTES] for at in range(0, len(prompt), HASH_BYTES)]
        assert shadow.ask([(key, use) for key in keys], 30) == node.ask(float(number), prompt)


def test_a_thinned_shadow_still_holds_together() -> None:
    """After the sample is halved, what is left hangs on its nearest ancestors, and all of it can leave."""
    shadow = Shadow(Youngest())
    rng = random.Random(4)
    for number in range(60):
        run = [bytes(16) + chain(number % 20, depth)[-HASH_BYTES:] for depth in range(1, rng.randint(2, 12))]
        shadow.ask([(key, stretch(1, number)) for key in run], 1e9)
    before = len(shadow)
    finish(shadow.thin_out_steps(EVERY_HASH // 2))
    assert 0.2 * before < len(shadow) < 0.8 * before
    shadow.ask([(bytes(16) + b"newcomer", stretch(1, 99))], 1)
    assert len(shadow) == 1


def test_a_shadow_shrinks_a_little_at_a_time() -> None:
    """Where the tiers hold much less than before, its cheapest leave in pieces, and no more than may stay are left over."""
    shadow = Shadow(Youngest())
    for number in range(5000):
        shadow.ask([(number.to_bytes(16, "big"), stretch(1, number))], 1e9)
    sizes = [len(shadow), *(len(shadow) for _ in shadow.shrink_steps(100)), len(shadow)]
    assert max(before - after for before, after in pairwise(sizes)) <= CONTEST_LEFT_AT_ONCE
    assert 100 <= sizes[-1] <= 100 + CONTEST_LEFT_AT_ONCE
    assert shadow.ask([((4999).to_bytes(16, "big"), stretch(1, 5000))], 100) == 1, "the youngest stays"


def test_a_loop_larger_than_the_cache_is_won_by_who_keeps() -> None:
    """Where LRU has no hit at all, ours soon has nearly those of the best."""
    node = Node(100, Learned())
    hits = [node.ask(float(number), chain(number % 20, 10)) for number in range(400)]
    assert sum(hits[200:]) > 0.7 * 200 * 10 * (100 / 200)


def test_the_first_judge_decides_until_another_is_better() -> None:
    """All judges agree while everything fits, and the first one is trusted."""
    reuse = Reuse()
    contest = Contest(all_judges(reuse))
    first = contest.judge
    for number in range(50):
        prompt = Prompt(1)
        lesson = contest.saw(prompt, [(bytes(16) + chain(number % 7, 1), stretch(1, number))], [], number)
        if lesson is not None:
            finish(lesson)
    assert contest.judge is first


def test_what_comes_back_is_worth_a_write() -> None:
    """Long prompts that nobody repeats and short ones that return: NVMe is told which is which."""
    family = Learned()
    node = Node(200, family)
    for step in range(3000):
        node.ask(float(step), chain(1000 + step, 20))
        node.ask(float(step) + 0.5, chain(step % 20, 3))
    blocks = node.engine.namespaces.get(node.space).blocks
    returning = [family.worth(b) for n in range(20) if (b := blocks.get(chain(n, 1))) is not None]
    passing = [
        family.worth(b) for n in range(2990, 3000) if (b := blocks.get(chain(1000 + n, 1))) is not None
    ]
    assert min(returning) > 0.9
    assert not passing or max(passing) < 0.1
