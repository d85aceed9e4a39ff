"""The digest of weights that a rank computes with: any change is seen, and what cannot be seen is said to be so."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from connectors.vllm.identity.live_weights import WEIGHTS_SUM_WORDS, Unseen, live_digest, tensors_digest
from tests.vllm.tiny_weights import TinyModel, give_model

pytestmark = pytest.mark.vllm

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
]


def config() -> Any:
    return SimpleNamespace(
        offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=0)),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def digest_of(engine: Any) -> str:
    return live_digest(engine, list(engine.compilation_config.static_forward_context))


def digest(*tensors: torch.Tensor) -> str:
    return tensors_digest((str(number), tensor) for number, tensor in enumerate(tensors))


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return (torch.randn(shape) * 40).to(dtype)


# ---- contents ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 36])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    """One bit changed anywhere gives another digest; changed back, the same; whatever the dtype, and also where a tensor
    is not whole words."""
    tensor = noise(dtype, size)
    first, seen = digest(tensor), set()
    raw = tensor.view(torch.uint8)
    for at, bit in itertools.product(range(len(raw)), range(8)):
        raw[at] ^= 1 << bit
        seen.add(digest(tensor))
        raw[at] ^= 1 << bit
    assert digest(tensor) == first
    assert len(seen) == 8 * len(raw) and first not in seen


def test_words_that_change_places() -> None:
    """Any two values of a chunk changed for each other give another digest, those that differ in one high bit too."""
    for spread in (torch.arange(60, dtype=torch.int32), torch.arange(60, dtype=torch.int32) << 26):
        first = digest(spread)
        for a, b in itertools.combinations(range(60), 2):
            if spread[a] != spread[b]:
                swapped = spread.clone()
                swapped[[a, b]] = spread[[b, a]]
                assert digest(swapped) != first, (a, b)


def test_places_far_apart_in_a_chunk_of_full_size() -> None:
    """The same at random places of a chunk as large as they are, with values that differ in their highest bit alone."""
    draw, words = random.Random(1), torch.zeros(WEIGHTS_SUM_WORDS, dtype=torch.int32)
    seen = {digest(words)}
    for at in [0, 1 << 19, *(draw.randrange(WEIGHTS_SUM_WORDS) for _ in range(10))]:
        words[at] = -(1 << 31)
        seen.add(digest(words))
        words[at] = 0
    assert len(seen) == 13


def test_chunks_and_tensors_that_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves from one chunk to another, or from one tensor to another, changes the digest."""
    monkeypatch.setattr("connectors.vllm.identity.live_weights.WEIGHTS_SUM_WORDS", 8)
    tensor = noise(torch.float32, 40)
    rolled = tensor.roll(8)
    assert len({digest(tensor), digest(rolled), digest(tensor, rolled), digest(rolled, tensor)}) == 4


def test_shapes_and_layouts() -> None:
    """Transposed and cut weights are read as they lie, gaps left out; shape, dtype and order of dimensions count."""
    wide = noise(torch.bfloat16, 30, 40)
    inside = wide[:, :33]
    before = digest(inside)
    wide[:, 33:] += 1
    assert digest(inside) == before  # what lies in the gaps is nobody's
    wide[29, 32] += 1
    assert digest(inside) != before
    same = [wide, wide.t(), wide.view(40, 30), wide.view(torch.int16), wide.contiguous().t().contiguous()]
    assert len({digest(tensor) for tensor in same}) == len(same)
    assert digest(wide.t()) == digest(wide.clone().t())
    odd = torch.zeros(7, dtype=torch.bfloat16)[1:]  # begins in the middle of a word
    assert digest(odd) == digest(torch.zeros(6, dtype=torch.bfloat16))
    for empty in (torch.empty(0), torch.tensor(3.0), torch.ones(3).expand(2, 3)):
        digest(empty)


def test_rows_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with gaps are copied by rows; a row may be longer than a chunk."""
    monkeypatch.setattr("connectors.vllm.identity.live_weights.WEIGHTS_SUM_WORDS", 8)
    wide = noise(torch.float32, 5, 50)
    before = digest(wide[:, :41])
    wide[4, 40] += 1
    assert digest(wide[:, :41]) != before


def test_tensors_without_memory() -> None:
    """Weights that are not loaded yet have no digest."""
    with pytest.raises(Unseen, match="has no memory"):
        digest(torch.empty(3, device="meta"))


# ---- models --------------------------------------------------------------------------------


def test_all_of_a_model_counts() -> None:
    """Parameters, buffers that are no part of a checkpoint, and the parts of a draft model count."""
    ours = config()
    model, draft = give_model(ours, 1), TinyModel(5)
    digests = [digest_of(ours)]
    for change in (
        lambda: model.fill(2),
        lambda: model.scale.fill_(3.0),
        lambda: _add_draft(ours, draft),
        lambda: draft.fill(6),
    ):
        change()
        digests.append(digest_of(ours))
    assert len(set(digests)) == 5
    draft.fill(5)
    assert digest_of(ours) == digests[3]


def _add_draft(ours: Any, draft: TinyModel) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(draft)
    ours.compilation_config.static_forward_context["draft"] = draft.attention


def test_layers_that_are_nowhere() -> None:
    """A layer with KV that is part of no model says that there are models which are not seen; others may be anywhere."""
    ours = config()
    give_model(ours, 1)
    before = digest_of(ours)
    ours.compilation_config.static_forward_context["experts"] = object()
    assert live_digest(ours, ["attention"]) == before
    for layers in (["attention", "experts"], ["attention", "unheard of"], []):
        with pytest.raises(Unseen, match="its models are not found"):
            live_digest(ours, layers)


def test_only_our_models_count() -> None:
    """Models of other engines in this process do not count, equal ones have equal digests, wrapped layers count."""
    ours, theirs = config(), config()
    model, other = give_model(ours, 1), give_model(theirs, 1)
    assert digest_of(ours) == digest_of(theirs)
    other.fill(2)
    before = digest_of(ours)
    assert before != digest_of(theirs)
    wrapper = torch.nn.Module()  # as for LoRA: it is not among what vLLM remembers
    wrapper.base_layer = model.projection
    model.projection = wrapper
    wrapped = digest_of(ours)
    model.projection.base_layer.weight.data[0, 0] += 1
    assert digest_of(ours) not in (before, wrapped)


def test_parameters_that_are_made_of_others() -> None:
    """A parameter with its bytes in tensors of its own is seen through."""
    ours = config()
    model = give_model(ours, 1)
    halves = {"first": torch.zeros(300), "second": torch.ones(300)}
    model.projection.weight.partitions = halves
    before = digest_of(ours)
    halves["second"][3] = 7
    assert digest_of(ours) != before


def test_weights_that_were_packed_away() -> None:
    """A layer that keeps an eighth of its bytes or more is quantised; with less it keeps them elsewhere."""
    ours = config()
    model = give_model(ours, 1)
    model.projection.weight = torch.nn.Parameter(torch.zeros(75))
    digest_of(ours)
    model.projection.weight = torch.nn.Parameter(torch.zeros(74))
    with pytest.raises(Unseen, match="projection does not keep them in its tensors"):
        digest_of(ours)
