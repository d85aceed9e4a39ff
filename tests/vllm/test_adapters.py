"""Adapters of LoRA by content: what the ranks have loaded names the blocks, and what is not known is not looked up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest

from connectors import constants as limits
from connectors.transfer.orders import Adapter
from connectors.vllm.identity.adapters import Adapters, LiveAdapters

pytestmark = pytest.mark.vllm

BASE = b"b" * 16


# ---- what a rank has loaded ----------------------------------------------------------------


def layer(value: float, name: str = "q", scaling: float = 1.0) -> LoRALayerWeights:
    return LoRALayerWeights(
        name, 2, 2, torch.full((2, 4), value), torch.ones(4, 2, dtype=torch.bfloat16), scaling
    )


def packed(*layers: LoRALayerWeights | None) -> PackedLoRALayerWeights:
    return PackedLoRALayerWeights.pack(layers)


def model(number: int = 1, **layers: Any) -> LoRAModel:
    return LoRAModel(number, 2, layers or {"a": layer(1.0), "b": packed(layer(2.0), None)})


def rank(*loaded: LoRAModel, number: int = 0) -> LiveAdapters:
    manager = SimpleNamespace(list_adapters=lambda: {one.id: one for one in loaded})
    return LiveAdapters([SimpleNamespace(), SimpleNamespace(lora_manager=manager)], number)


DIFFERENT: dict[str, Callable[[], LoRAModel]] = {
    "a weight": lambda: model(a=layer(1.5), b=packed(layer(2.0), None)),
    "a name": lambda: model(c=layer(1.0), b=packed(layer(2.0), None)),
    "a layer less": lambda: model(a=layer(1.0)),
    "which half": lambda: model(a=layer(1.0), b=packed(None, layer(2.0))),
    "a scale": lambda: model(a=layer(1.0, scaling=0.5), b=packed(layer(2.0), None)),
    "how experts lie": lambda: LoRAModel(1, 2, model().loras, is_3d_lora_weight=True),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_whatever_is_computed_with_counts(kind: str) -> None:
    """Tensors, the numbers beside them and where they belong; not the number that it has in the engine."""
    known = rank(model()).digests()[1]
    assert rank(DIFFERENT[kind]()).digests()[1] not in ("", known)
    assert rank(model(7)).digests() == {7: known}


def test_an_adapter_is_digested_each_time_it_is_loaded() -> None:
    """Loaded again in place it is another object under the same number; one that stays is not digested again."""
    loaded = [model(a=layer(1.0)), model(2, a=layer(2.0))]
    ours = rank(*loaded)
    ours._manager.list_adapters = lambda: {one.id: one for one in loaded}
    first = ours.digests()
    loaded[1].loras["a"].lora_a.fill_(9)  # nobody does: it would be seen if it was digested again
    assert ours.digests() == first
    loaded[0] = model(a=layer(3.0))
    assert ours.digests()[1] not in (first[1], "") and ours.digests()[2] == first[2]
    loaded.clear()
    assert ours.digests() == {}


def test_what_is_not_to_be_seen_is_said_to_be_so() -> None:
    """Adapters that hold something else than tensors, and models without any manager of them."""
    strange = model(a=layer(1.0))
    strange.loras["a"].lora_a = object()  # type: ignore[assignment]
    assert rank(strange).digests() == {1: ""}
    assert LiveAdapters([SimpleNamespace()], 0).digests() == {0: ""}


def test_a_rank_agrees_unless_it_has_something_else() -> None:
    """What is not loaded yet may still become what is expected."""
    ours = rank(model(), number=1)
    known = ours.digests()[1]
    assert ours.agrees(None) and ours.agrees(Adapter(1, ("x", known))) and ours.agrees(Adapter(2, ("x", "y")))
    assert not ours.agrees(Adapter(1, (known, "x")))


# ---- what the scheduler makes of it ----------------------------------------------------------


class Engine:
    """An engine's adapters: `world` ranks that answer when they are asked."""

    def __init__(self, cache: Path, world: int = 1, tower: bool = False) -> None:
        self.said: list[str] = []
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=world),
            lora_config=SimpleNamespace(enable_tower_connector_lora=tower),
        )
        self.adapters = Adapters(config, cache, self.said.append)
        self.world, self.loaded, self.asked = world, dict[int, str](), 0

    def step(self) -> None:
        """Ranks answer; what is read in the background is read."""
        self.asked = max(self.asked, self.adapters.asks)
        self.adapters.reported({n: (self.asked, self._of(n)) for n in range(self.world)})
        for work in self.adapters._noting:
            work.wait(30)

    def _of(self, number: int) -> dict[int, str]:
        return {adapter: f"{digest}{number}" for adapter, digest in self.loaded.items()}

    def expected(self, digest: str, number: int = 1) -> Adapter:
        return Adapter(number, tuple(f"{digest}{n}" for n in range(self.world)))

    def ask(self, lora: LoRARequest, base: bytes = BASE) -> Adapter | None:
        """As vLLM asks: again in each step, until it is known."""
        self.adapters.meet(lora)
        for _ in range(10):
            is_known, adapter = self.adapters.to_load(lora, base)
            if is_known:
                return adapter
            for one in self.adapters._unloaded.values():
                one.files.wait(30)
            self.adapters.to_load(lora, base)
            self.step()
        raise AssertionError("never known")

    def load(self, number: int, digest: str) -> None:
        self.loaded[number] = digest
        self.step()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.transfer.weights.WEIGHTS_SETTLED_S", 0)


def written(directory: Path, content: bytes = b"w", config: bytes = b"{}") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_bytes(config)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return str(directory)


def request(path: str, number: int = 1, name: str = "mine") -> LoRARequest:
    return LoRARequest(name, number, path)


@pytest.mark.parametrize("world", [1, 2])
def test_a_fresh_engine_knows_an_adapter_that_another_one_loaded(world: int, tmp_path: Path) -> None:
    """The first one looks nothing up, and saves once its ranks have said what they have; the next one, in the same files
    under another name and number, knows it before it is loaded."""
    first = Engine(tmp_path / "cache", world)
    lora = request(written(tmp_path / "a"))
    assert first.ask(lora) is None and first.adapters.to_save(lora) is None
    first.load(1, "x")
    assert first.adapters.to_save(lora) == first.ask(lora) == first.expected("x")
    second = Engine(tmp_path / "cache", world)
    moved = request(written(tmp_path / "b"), number=5, name="other")
    assert second.ask(moved) == second.expected("x", 5)
    assert second.adapters.to_save(moved) is None
    assert Engine(tmp_path / "cache", world).ask(moved, b"other model") is None
    assert not first.said + second.said


@pytest.mark.parametrize("change", [{"content": b"v"}, {"config": b'{"r": 2}'}])
def test_other_files_are_another_adapter(change: dict[str, bytes], tmp_path: Path) -> None:
    """The same name and path, in a fresh engine."""
    lora = request(written(tmp_path / "a"))
    first = Engine(tmp_path / "cache")
    first.ask(lora)
    first.load(1, "x")
    stamp = os.stat(tmp_path / "a" / "adapter_model.safetensors")
    written(tmp_path / "a", **change)
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = Engine(tmp_path / "cache")
    assert second.ask(lora) is None
    second.load(1, "y")
    assert second.ask(lora) == second.expected("y")


def test_what_was_loaded_before_its_files_were_known(tmp_path: Path) -> None:
    """It may be of other files than those that lie there now: it is what the ranks say, and nothing is noted of it."""
    lora = request(written(tmp_path / "a"))
    first = Engine(tmp_path / "cache")
    first.load(1, "x")
    written(tmp_path / "a", b"changed since")
    assert first.ask(lora) == first.expected("x")
    assert Engine(tmp_path / "cache").ask(lora) is None


def test_what_was_loaded_while_its_files_changed(tmp_path: Path) -> None:
    """Nothing is noted of it either."""
    lora = request(written(tmp_path / "a"))
    first = Engine(tmp_path / "cache")
    assert first.ask(lora) is None
    written(tmp_path / "a", b"changed since")
    first.load(1, "x")
    for engine in (Engine(tmp_path / "cache"), Engine(tmp_path / "cache")):
        assert engine.ask(lora) is None
        written(tmp_path / "a")


def test_loaded_between_the_digest_and_the_question(tmp_path: Path) -> None:
    """What ranks answer counts, not what the files say."""
    lora = request(written(tmp_path / "a"))
    first = Engine(tmp_path / "cache")
    first.ask(lora)
    first.load(1, "x")
    second = Engine(tmp_path / "cache")
    second.loaded[1] = "y"
    assert second.ask(lora) == second.expected("y")
    third = Engine(tmp_path / "cache")
    assert third.ask(lora) == third.expected("x"), "no note was written of what nobody saw being loaded"


def test_a_name_that_stands_for_other_weights(tmp_path: Path) -> None:
    """vLLM's own cache goes by name and path: such requests are not served, until it was emptied. Loaded in place, under
    another number, or seen only by a report: it is the same."""
    lora, other = request(written(tmp_path / "a")), request(written(tmp_path / "b", b"v"), 2, "another")
    for again in (1, 3):
        engine = Engine(tmp_path / f"cache-{again}")
        engine.ask(lora)
        engine.load(1, "x")
        engine.adapters.meet(request(lora.lora_path, again))
        engine.load(again, "y")
        for number in {1, again}:
            lora_again = request(lora.lora_path, number)
            assert engine.ask(lora_again) is None and engine.adapters.to_save(lora_again) is None
        assert len(engine.said) == 1 and "mine" in engine.said[0]
        engine.ask(other)
        engine.load(2, "z")
        assert engine.ask(other) == engine.expected("z", 2)
        engine.adapters.reset()
        assert engine.ask(request(lora.lora_path, again)) == engine.expected("y", again)


def test_an_adapter_that_was_unloaded_is_asked_for_again(tmp_path: Path) -> None:
    """Its files may have changed meanwhile."""
    lora = request(written(tmp_path / "a"))
    engine = Engine(tmp_path / "cache")
    engine.ask(lora)
    engine.load(1, "x")
    engine.loaded.clear()
    engine.step()
    assert engine.ask(lora) == engine.expected("x") and engine.adapters.to_save(lora) is None
    written(tmp_path / "a", b"other")
    assert engine.ask(lora) is None


@pytest.mark.parametrize("kind", ["tower", "not seen", "opaque", "one rank has it", "no directory"])
def test_what_is_not_known_is_not_looked_up(kind: str, tmp_path: Path) -> None:
    """Adapters that change images, that no rank sees or can digest, that only some ranks have, or that are no files."""
    path = written(tmp_path / "a")
    first = Engine(tmp_path / "cache", 2)
    first.ask(request(path))
    first.load(1, "x")
    engine = Engine(tmp_path / "cache", 2, tower=kind == "tower")
    answers: dict[str, Any] = {"not seen": {0: ""}, "opaque": {1: ""}, "one rank has it": {1: "x0"}}
    if kind in answers:
        of_other = {} if kind == "one rank has it" else answers[kind]
        engine._of = lambda number: of_other if number else answers[kind]  # type: ignore[method-assign]
        engine.step()
    lora = request(path if kind != "no directory" else "org/adapter")
    assert engine.ask(lora) is None and engine.adapters.to_save(lora) is None
    assert bool(engine.said) == (kind in ("tower", "not seen", "opaque"))


def test_what_has_no_files_keeps_nobody_waiting(tmp_path: Path) -> None:
    """An adapter that is not there has nothing to be read: its first request is answered at once. When its files come, they count."""
    engine, path = Engine(tmp_path / "cache"), tmp_path / "a"
    lora = request(str(path))
    assert engine.adapters.to_load(lora, BASE) == (True, None)
    written(path)
    assert engine.adapters.to_load(lora, BASE)[0] is False


def test_ranks_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for them for a while only."""
    monkeypatch.setattr(limits, "RANKS_WAIT_S", 0)
    engine = Engine(tmp_path / "cache")
    lora = request(written(tmp_path / "a"))
    assert engine.adapters.to_load(lora, BASE) == (True, None)


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loads ever new adapters does not grow."""
    monkeypatch.setattr("connectors.vllm.identity.adapters.ADAPTERS_KNOWN_MAX", 2)
    engine = Engine(tmp_path / "cache")
    for number in range(1, 6):
        lora = request(written(tmp_path / str(number), bytes([number])), number, str(number))
        engine.ask(lora)
        engine.load(number, str(number))
        assert engine.ask(lora) == engine.expected(str(number), number)
    assert list(engine.adapters._keys) == [4, 5] and len(engine.adapters._meant) <= 3


def test_a_damaged_note_is_none(tmp_path: Path) -> None:
    """What is not whole, or of another number of ranks, says nothing."""
    lora = request(written(tmp_path / "a"))
    first = Engine(tmp_path / "cache")
    first.ask(lora)
    first.load(1, "x")
    (note,) = (tmp_path / "cache").rglob("adapter-*.json")
    for text in ("{", "[]", '{"digests": 1}', '{"digests": []}', '{"digests": ["a", "b"]}', "[" * 9000):
        note.write_text(text)
        assert Engine(tmp_path / "cache").ask(lora) is None
