"""`kvstore explain --engines`: which fields separate engines of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.ledger.engines import compared
from kvstore.ledger.explain import NoneSuch
from tests.running import Daemon, Place, kvstore


def space_of(digest: str, blocks: int = 0, **fields: str) -> dict[str, Any]:
    told = {"model": "llama", "tenant": "", "group": "0", "weights": "w", "configuration": "c"}
    return {"digest": digest, "blocks": blocks, "fields": {**told, **fields}}


def test_a_setting_that_one_engine_has_is_told() -> None:
    """The default of the other is null; the digest of all settings comes after it."""
    spaces = [
        space_of("aa", 1, cache_config='{"block_size":16}'),
        space_of("bb", 5, configuration="d", cache_config='{"cache_dtype":"fp8","block_size":16}'),
    ]
    document = compared(spaces, "", "llama", None)
    assert [engine["namespaces"] for engine in document["engines"]] == [["bb"], ["aa"]]
    assert document["differences"] == [
        {"field": "cache_config.cache_dtype", "counts": True, "values": ["fp8", None]},
        {"field": "configuration", "counts": True, "values": ["d", "c"]},
    ]


def test_names_do_not_count() -> None:
    """What the first engine called the model is told, and said to separate nobody."""
    document = compared([space_of("aa", weights="x"), space_of("bb", model="llama-copy")], "", "", None)
    assert [(row["field"], row["counts"]) for row in document["differences"]] == [
        ("weights", True),
        ("model", False),
    ]


def test_groups_of_one_engine_are_one() -> None:
    """Namespaces of an engine's KV groups stand together; what differs between groups of two engines goes by number."""
    first = [space_of("aa"), space_of("ab", group="1", layout="L")]
    other = [space_of("ba", weights="x"), space_of("bb", group="1", layout="M", weights="x")]
    document = compared([*first, *other], "", "", None)
    assert [engine["namespaces"] for engine in document["engines"]] == [["aa", "ab"], ["ba", "bb"]]
    assert [row["field"] for row in document["differences"]] == ["group 1: layout", "weights"]


def test_nothing_like_that() -> None:
    """Neither a model nor a tenant of that name."""
    with pytest.raises(NoneSuch):
        compared([space_of("aa")], "", "gpt", None)
    with pytest.raises(NoneSuch):
        compared([space_of("aa")], "", "", "acme")


def test_a_running_daemon_is_asked(place: Place, serve: Callable[..., Daemon]) -> None:
    """As a table and as JSON; a model that is not there ends with 3, and with a prompt it is a wrong usage."""
    serve(place)
    with Client(place.socket) as client:
        for number, dtype in enumerate(("auto", "fp8")):
            fields = {"model": "llama", "cache_config": json.dumps({"cache_dtype": dtype})}
            space = client.namespace(bytes([number]) * 16, 4096, 32, 16, fields)
            assert client.put(space, [bytes(32)], b"", [bytes(4096)]) == 1
        asked = ("explain", "--engines", "--socket", place.socket)
        table, answer = kvstore(*asked), kvstore(*asked, "-o", "json")
        missing, wrong = kvstore(*asked, "--model", "gpt"), kvstore(*asked, "text")
    assert (table.returncode, answer.returncode) == (0, 0)
    assert "cache_config.cache_dtype" in table.stdout and "fp8" in table.stdout
    assert json.loads(answer.stdout)["differences"][0]["values"] == ["auto", "fp8"]
    assert (missing.returncode, wrong.returncode) == (3, 2)
