"""Prefixes that somebody names by their last block: what the door tells of them, and brings into DRAM."""

from __future__ import annotations

import pytest

from kvstore.client import Client, Refused
from kvstore.engine import prefix_warming
from tests.door.conftest import hashes_of, records_of, space_of
from tests.door.daemon import Daemon
from tests.door.test_lost import demoted, with_nvme

__all__ = ["with_nvme"]  # a fixture


def test_chains_are_told_for_each_namespace(with_nvme: Daemon) -> None:
    """From the first block on, of those that know the block; a beginning of a digest names some of them."""
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        space, hashes = demoted(with_nvme, client)
        other = space_of(client, "other")
        client.put(other, hashes[:2], b"", records_of(2))
        assert client.chains(hashes[1]) == [
            (space.digest, b"".join(hashes[:2])),
            (other.digest, b"".join(hashes[:2])),
        ]
        assert client.chains(hashes[2]) == [(space.digest, b"".join(hashes))]
        assert [digest for digest, _ in client.chains(hashes[1], other.digest.hex()[:6])] == [other.digest]
        assert client.chains(hashes_of(1, "strange")[0]) == client.chains(b"short") == []


def test_warming_goes_on_as_it_is_asked(with_nvme: Daemon) -> None:
    """What DRAM has is held, the rest is on its way until the device has answered, and then it is over."""
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        _, hashes = demoted(with_nvme, client)
        told = client.warm_prefix(hashes[2])
        assert (told["held"], told["under_way"], told["loaded"], told["is_over"]) == (1, 2, 0, False)
        assert client.warm_prefix(hashes[2])["under_way"] == 2, "it was not begun twice"
        with_nvme.call(with_nvme.io.run)
        told = client.warm_prefix(hashes[2])
        assert (told["held"], told["under_way"], told["loaded"], told["is_over"]) == (1, 0, 2, True)
        assert client.warm_prefix(hashes[1])["held"] == 2, "another prefix begins anew"


def test_a_prefix_of_too_many_namespaces_is_to_be_named_more_exactly(
    with_nvme: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tenants have the same system prompt: none of them is loaded by surprise."""
    monkeypatch.setattr(prefix_warming, "WARM_NAMESPACES_MAX", 1)
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        _, hashes = demoted(with_nvme, client)
        client.put(space_of(client, "other"), hashes[:2], b"", records_of(2))
        with pytest.raises(Refused, match="more than 1 namespaces have it: name one with --namespace"):
            client.warm_prefix(hashes[1])
        assert client.warm_prefix(hashes[1], b"other".hex())["held"] == 2
        with pytest.raises(Refused, match="neither a tier of this node nor the region's bucket"):
            client.warm_prefix(hashes[1], "ffff")
