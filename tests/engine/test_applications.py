"""Applications: the largest are found among any number of others, and have an experience of their own."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.constants import (
    APPLICATION_REQUESTS_MIN,
    APPLICATIONS_COUNTED_MAX,
    APPLICATIONS_FADE_REQUESTS,
    APPLICATIONS_MAX,
)
from kvstore.policies.learned import Learned
from kvstore.policies.learned.applications import Applications
from kvstore.policies.learned.hazard import KINDS
from kvstore.replay.cell import Node

HASH_BYTES = 8


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def prompt(first: int, start: int, count: int) -> bytes:
    """One first block, then blocks of its own."""
    return name(first) + b"".join(name(start + depth) for depth in range(count))


def test_large_applications_are_found_among_many_small_ones() -> None:
    """Half of the requests are of three applications, all others of ten thousand."""
    rng = random.Random(1)
    taken: list[int] = []
    applications = Applications(taken.append)
    for _ in range(4000):
        applications.saw(name(rng.randrange(3) if rng.random() < 0.5 else rng.randrange(10, 10_000)))
    places = [applications.place(name(number)) for number in range(3)]
    assert sorted(places) == sorted(taken) and len(set(places)) == 3 and 0 not in places


def test_first_blocks_that_hardly_come_back_get_no_place() -> None:
    """However many there are: a count that was inherited is no evidence."""
    applications = Applications(lambda place: None)
    for number in range(100_000):
        applications.saw(name(number // 2))
        assert not applications.place(name(number // 2))


def test_places_go_to_those_who_are_large_now() -> None:
    """All places are taken; the former applications end, and others come."""
    taken: list[int] = []
    applications = Applications(taken.append)
    for step in range(2 * APPLICATIONS_FADE_REQUESTS):
        applications.saw(name(step % APPLICATIONS_MAX))
    assert sorted(taken) == list(range(1, APPLICATIONS_MAX + 1))
    for step in range(4 * APPLICATIONS_FADE_REQUESTS):
        applications.saw(name(100 + step % 3))
    assert len({applications.place(name(100 + number)) for number in range(3)} - {0}) == 3
    assert len(taken) == APPLICATIONS_MAX + 3


@given(st.lists(st.integers(0, 200), max_size=2000), st.integers(1, 20))
def test_nobody_shares_a_place(firsts: list[int], repeated: int) -> None:
    """Whatever comes: places differ, are within their number, and cost requests."""
    applications = Applications(lambda place: None)
    requests: Counter[int] = Counter()
    for first in firsts:
        for _ in range(repeated):
            applications.saw(name(first))
        requests[first] += repeated
    places = {first: applications.place(name(first)) for first in requests}
    given_places = [place for place in places.values() if place]
    assert len(given_places) == len(set(given_places)) <= APPLICATIONS_MAX
    assert all(1 <= place <= APPLICATIONS_MAX for place in given_places)
    assert all(requests[first] >= APPLICATION_REQUESTS_MIN for first, place in places.items() if place)
    assert len(applications._counts) <= APPLICATIONS_COUNTED_MAX


def test_applications_of_one_size_are_told_apart() -> None:
    """Prompts of the same length: those of one application come back at once, those of the other never."""
    family = Learned()
    node = Node(400, family)
    for number in range(2000):
        node.ask(float(number), prompt(1, 10**6 + number // 2 * 1000, 5))
        node.ask(float(number), prompt(2, 10**9 + number * 1000, 5))
    blocks, reuse = node.engine.namespaces.get(node.space).blocks, family.reuse
    back, never = (blocks[name(at)].stretch for at in (10**6 + 999 * 1000, 10**9 + 1999 * 1000))
    assert back is not None and never is not None and back.kind // KINDS != never.kind // KINDS
    kind, now = never.kind % KINDS, reuse.now
    everybody = reuse.density(kind, now)
    assert (
        reuse.density(back.kind // KINDS * KINDS + kind, now)
        > everybody
        > 10 * reuse.density(never.kind, now)
    )
    reuse._forget_application(never.kind // KINDS)
    assert reuse.density(never.kind, now) == everybody
    node.close()
