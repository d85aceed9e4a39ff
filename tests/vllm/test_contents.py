"""Names of blocks: what identifiers stand for is in them, and a request whose content is not known has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from connectors.vllm.geometry import Group, Plan
from connectors.vllm.identity.contents import Contents, Names

pytestmark = pytest.mark.vllm

TOKENS = 16  # of a block
BLOCKS = 8
HASHES = [bytes([n]) * 32 for n in range(BLOCKS)]


def item(**fields: Any) -> MultiModalKwargsItem:
    made = {key: MultiModalFieldElem(value, MultiModalBatchedField()) for key, value in fields.items()}
    return MultiModalKwargsItem(made)


def picture(value: float = 1.0, **more: Any) -> MultiModalKwargsItem:
    return item(pixel_values=torch.full((3, 8, 8), value), **more)


def feature(
    data: Any = None, offset: int = 40, identifier: str = "cat", modality: str = "image", embed: Any = None
) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset, 20, embed)
    return MultiModalFeatureSpec(
        picture() if data is None else data, modality, identifier, place, mm_hash=identifier
    )


def request(*features: MultiModalFeatureSpec, **more: Any) -> Any:
    given = {"prompt_embeds": None, "prompt_is_token_ids": None, "resumable": False, **more}
    return SimpleNamespace(block_hashes=list(HASHES), mm_features=list(features), **given)


def contents(said: list[str] | None = None, **changes: Any) -> Contents:
    value = {"mm_processor_cache_gb": 4, "mm_processor_cache_type": "lru", "prefix": True, **changes}
    prefix, encoded = value.pop("prefix"), value.pop("encoded", False)
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_consumer=True) if encoded else None,
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(**value)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix),
    )
    return Contents(config, (said if said is not None else []).append)


def names(asked: Any, known: Contents | None = None) -> list[bytes]:
    made = Names(asked, TOKENS, known or contents())
    assert not made.unknown
    return made[0:BLOCKS]


def test_tokens_alone_keep_vllms_hash() -> None:
    """Without images nothing is added, and blocks that come later are there."""
    plain = request()
    made = Names(plain, TOKENS, contents())
    assert made[0:BLOCKS] == HASHES and not made.unknown
    plain.block_hashes.append(b"x" * 32)
    assert len(made) == BLOCKS + 1 and made[BLOCKS : BLOCKS + 5] == [b"x" * 32]


@given(offset=st.integers(0, BLOCKS * TOKENS - 1))
def test_a_picture_counts_from_its_first_token_on(offset: int) -> None:
    """Blocks that end before it keep vLLM's hash; all others have a name of their length that another picture changes."""
    one, other = (names(request(feature(picture(value), offset))) for value in (1, 2))
    before = offset // TOKENS
    assert one[:before] == other[:before] == HASHES[:before]
    assert all(
        len({*pair, hash_}) == 3
        for *pair, hash_ in zip(one[before:], other[before:], HASHES[before:], strict=True)
    )
    assert {len(name) for name in one} == {32}


DIFFERENT: dict[str, Callable[[], MultiModalFeatureSpec]] = {
    "a pixel": lambda: feature(item(pixel_values=torch.ones(3, 8, 8).index_fill(0, torch.tensor([1]), 2))),
    "a dtype": lambda: feature(item(pixel_values=torch.ones(3, 8, 8, dtype=torch.float64))),
    "a shape": lambda: feature(item(pixel_values=torch.ones(3, 4, 16))),
    "a field more": lambda: feature(picture(grid_thw=torch.tensor([1, 2, 2]))),
    "a plain value": lambda: feature(picture(fps=2.0)),
    "a name of a field": lambda: feature(item(pixels=torch.ones(3, 8, 8))),
    "nested": lambda: feature(item(pixel_values=[torch.ones(3, 8, 8)])),
    "a modality": lambda: feature(modality="video"),
    "a place": lambda: feature(offset=41),
    "which tokens are replaced": lambda: feature(embed=torch.arange(20) % 2 == 0),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_whatever_the_model_is_given_counts(kind: str) -> None:
    """One identifier, as a user may give it to anything, or vLLM's hash of what was sent, before another processor."""
    assert names(request(DIFFERENT[kind]()))[-1] != names(request(feature()))[-1]
    assert names(request(DIFFERENT[kind]())) == names(request(DIFFERENT[kind]()))


def test_later_pictures_count_later() -> None:
    """The second one leaves the names between as they are; what came first counts for all behind it."""
    first, second = feature(picture(1), 20, "a"), feature(picture(2), 90, "b")
    both, alone = names(request(first, second)), names(request(first))
    assert both[:5] == alone[:5] and all(x != y for x, y in zip(both[5:], alone[5:], strict=True))
    swapped = names(request(feature(picture(2), 20, "b"), feature(picture(1), 90, "a")))
    assert all(x != y for x, y in zip(both[1:], swapped[1:], strict=True))


def test_a_session_that_gets_another_picture() -> None:
    """Features that come later are seen."""
    asked = request(feature(picture(1), 20, "a"))
    made = Names(asked, TOKENS, contents())
    before = made[0:BLOCKS]
    asked.mm_features.append(feature(picture(2), 90, "b"))
    assert (
        made[0:5] == before[:5] and made[0:BLOCKS] == names(request(*copy.copy(asked.mm_features))) != before
    )


def test_plans_take_names_as_hashes() -> None:
    """Blocks of several hashes have the name of their last."""
    plan = Plan((Group(0, 32, None, False),), TOKENS, 32, False, False)
    made = Names(request(feature()), TOKENS, contents())
    assert plan.hashes(plan.groups[0], made, 1, 3) == [made[3:4][0], made[5:6][0]]


def test_embeddings_count_by_their_type() -> None:
    """vLLM hashes their bytes, which two types may share."""
    half, brain = (
        request(prompt_embeds=torch.zeros(64, 8, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)
    )
    assert not set(names(half)) & set(names(brain)) and names(half) == names(half)


# ---- what has no name ----------------------------------------------------------------------

UNKNOWN: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "numbered": (feature, {"mm_processor_cache_gb": 0, "prefix": False}, "numbers image"),
    "numbered by its look": (lambda: feature(identifier="renderer0-mm-17-image-0"), {}, "numbers image"),
    "shared memory": (feature, {"mm_processor_cache_type": "shm"}, "not to be seen"),
    "encoded elsewhere": (feature, {"encoded": True}, "not to be seen"),
    "an address": (lambda: feature(item(address=4096, monotonic_id=3)), {}, "not to be seen"),
    "kept elsewhere": (lambda: feature(MultiModalKwargsItem()), {}, "not to be seen"),
    "a field kept elsewhere": (lambda: feature(picture(grid=None)), {}, "NoneType"),
    "an object": (lambda: feature(picture(what=object())), {}, "object"),
    "an object within": (lambda: feature(picture(what=[torch.ones(1), {"a": {1}}])), {}, "set"),
    "an array of objects": (
        lambda: feature(picture(what=__import__("numpy").array([object()]))),
        {},
        "ndarray",
    ),
    "a tensor without memory": (lambda: feature(item(pixels=torch.ones(3, device="meta"))), {}, "meta"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_has_no_name_is_said_once(kind: str) -> None:
    """One line each; the request has no names."""
    make, changes, words = UNKNOWN[kind]
    said: list[str] = []
    made = Names(request(make()), TOKENS, contents(said, **changes))
    assert words in made.unknown
    assert len(said) == 1 and words in said[0] and "neither looked up nor saved" in said[0]


def test_a_mixed_prompt_has_no_name() -> None:
    """A hash of tokens and embeddings does not say which is which."""
    mixed = request(prompt_embeds=torch.zeros(64, 8), prompt_is_token_ids=[True] * 64)
    assert "mixed" in Names(mixed, TOKENS, contents()).unknown


def test_an_identifier_that_stands_for_two_things() -> None:
    """vLLM's own caches go by it: from the second content on no request with it is trusted, the first one neither."""
    known = contents()
    first, second = request(feature(picture(1))), request(feature(picture(2)))
    assert not Names(first, TOKENS, known).unknown
    for asked in (second, first, second):
        assert "several" in Names(asked, TOKENS, known).unknown
    assert not Names(request(feature(picture(2), identifier="dog")), TOKENS, known).unknown
    assert not Names(second, TOKENS, contents()).unknown, "another engine knows nothing of the first"


def test_a_request_in_flight_when_its_identifier_comes_to_stand_for_something_else() -> None:
    """It loses its names: what vLLM computes of it from then on may be of the other picture."""
    known = contents()
    first = Names(request(feature(picture(1))), TOKENS, known)
    assert not first.unknown
    assert "several" in Names(request(feature(picture(2))), TOKENS, known).unknown
    assert "several" in first.unknown


def test_a_session_that_gets_an_item_under_the_identifier_of_another_request() -> None:
    """It is noted when the other one is asked about, in the step that computes the item, and not when the session is."""
    known, asked = contents(), request(resumable=True)
    first, session = Names(request(feature(picture(1))), TOKENS, known), Names(asked, TOKENS, known)
    assert not first.unknown and not session.unknown
    asked.mm_features.append(feature(picture(2)))
    assert "several" in first.unknown and "several" in session.unknown


OTHERS: dict[str, Callable[[], Any]] = {
    "behind one that is not seen": lambda: request(
        feature(picture(grid=None), identifier="dog"), feature(picture(2), 90)
    ),
    "not seen itself": lambda: request(feature(picture(2, grid=None))),
    "in a mixed prompt": lambda: request(
        feature(picture(2)), prompt_embeds=torch.zeros(64, 8), prompt_is_token_ids=[True] * 64
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_has_no_name_itself_takes_that_of_others(kind: str) -> None:
    """Every item of every request is looked at: vLLM may compute it in the place of another one of its identifier."""
    known = contents()
    first = Names(request(feature(picture(1))), TOKENS, known)
    assert not first.unknown
    assert Names(OTHERS[kind](), TOKENS, known).unknown
    assert "several" in first.unknown


def test_identifiers_are_forgotten_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused ones."""
    monkeypatch.setattr("connectors.vllm.identity.contents.CONTENTS_KNOWN_MAX", 3)
    known = contents()
    for identifier in "abcad":
        assert not Names(request(feature(identifier=identifier)), TOKENS, known).unknown
    assert list(known._known) == ["c", "a", "d"]
