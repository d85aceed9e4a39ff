"""Hashes that form no chain: a client of ours never asks for them, and whoever does gets an answer."""

from __future__ import annotations

import logging

import pytest

from kvstore.client import Client
from kvstore.ledger import accounts
from kvstore.protocol import outcomes
from kvstore.steps import finish
from tests.door.conftest import hashes_of
from tests.door.daemon import Daemon
from tests.door.test_lost import demoted, with_nvme

__all__ = ["with_nvme"]  # a fixture


def test_hashes_in_any_order_are_explained_and_booked(
    with_nvme: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown hashes among held ones: each block has its own outcome, a lookup of them is booked, nothing fails inside."""
    caplog.set_level(logging.ERROR)
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        space, held = demoted(with_nvme, client)
        strange = hashes_of(2, "strange")
        for asked in ([strange[0], *held], [held[0], strange[0], held[1], held[2]], [*strange, *held[::-1]]):
            places, judged = client.explain([space.digest], b"".join(asked))
            assert places[0].count(0) == asked.count(strange[0]) + asked.count(strange[1])
            hits = {block_hash for n, block_hash in enumerate(asked) if judged[n] in outcomes.HITS}
            assert hits <= set(held), "what is not there does not hit"
            client.lookup([space], asked, ticket=1)
        told = client.live()["tokens"][0]
        assert told["lookups"] == 1 and sum(told["tokens"].values()) == 16 * len(asked)
    assert not caplog.records


def test_a_block_that_leaves_between_two_steps(with_nvme: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What left after the prefix was found, before its blocks are looked at, is missed, for the reason that it left for."""
    monkeypatch.setattr(accounts, "JUDGE_STEP_BLOCKS", 1)
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        _, held = demoted(with_nvme, client)

        def explained() -> list[int]:
            engine = with_nvme.engine
            steps = engine.explain_steps([0], b"".join(held))
            next(steps)  # where they are
            next(steps)  # the prefix, and its first block
            engine.blocks.left_nvme(engine.namespaces.get(0).blocks[held[2]], why=outcomes.EVICTED_NVME)
            return finish(steps)[1]

        judged = with_nvme.call(explained)
    assert judged == [outcomes.HIT_DRAM, outcomes.HIT_NVME, outcomes.EVICTED_NVME]
