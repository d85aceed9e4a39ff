"""Which adapter of LoRA a request is computed with, by content: a namespace for each.

What counts is what the ranks have loaded (`LiveAdapters`); they say so whenever it changes. That is not known of an
adapter that is not loaded yet, so its files are digested, and a note in the cache directory says what ranks made of
these files before:

    a request comes ─┬─ its adapter is loaded ───────────────────────────────▶ its digests
                     └─ it is not known ─▶ digest its files ─▶ ask the ranks ─┬─ loaded ─▶ its digests
                                                                              └─ not yet ─▶ those of the note, if any
    it is loaded, and its files are still the same ─▶ the note is written

Ranks check again when they copy: loads and saves for an adapter that is not the one they have come to nothing.

vLLM's own prefix cache goes by name and path. So when these stand for other weights than before, what is found there is
not to be trusted: such requests are neither looked up nor saved any more, until vLLM's cache was emptied.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
import xxhash

from connectors import constants as limits
from connectors.transfer.orders import Adapter
from connectors.transfer.weights import (
    DigestInBackground,
    Facts,
    WeightsUnknown,
    file_facts,
    read_note,
    weights_digest,
    write_note,
)

ADAPTERS_KNOWN_MAX = 1 << 16  # of which it is remembered what they stand for

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # the first one is loaded
Key = tuple[str, str]  # name and path, as in block hashes


@dataclass(slots=True)
class _Unloaded:
    """An adapter that no rank has loaded, as far as we know. stamp: its files, when they were digested. base: the namespaces
    without an adapter. files: their digest. asked: the number of the question whether it is loaded; 0 before it was asked."""

    path: str
    stamp: list[Facts]
    base: bytes
    files: DigestInBackground
    asked: int = 0
    until_s: float = field(default_factory=lambda: time.monotonic() + limits.RANKS_WAIT_S)


class Adapters:
    """asks: the number of the question that the ranks are to answer with their next report; 0 if there is none."""

    def __init__(self, vllm_config: Any, cache: Path, say: Callable[[str], None]) -> None:
        self._cache, self._say = cache, say
        self._world = int(vllm_config.parallel_config.world_size)
        lora = vllm_config.lora_config
        self._sees = lora is not None and bool(lora.enable_tower_connector_lora)
        self._by_rank: dict[int, tuple[int, dict[int, str]]] = {}
        self._numbers = itertools.count(1)
        self._unloaded: dict[int, _Unloaded] = {}
        self._keys: dict[int, set[Key]] = {}  # that requests have for a number
        self._meant: dict[Key, tuple[str, ...]] = {}
        self._ambiguous: set[Key] = set()
        self._noting: list[DigestInBackground] = []

    @property
    def asks(self) -> int:
        open_ = [one.asked for one in self._unloaded.values() if one.asked > self._answered()]
        return max(open_, default=0)

    def close(self) -> None:
        """Stop reading files."""
        for work in [*self._noting, *(one.files for one in self._unloaded.values())]:
            work.close()

    def reset(self) -> None:
        """vLLM's own prefix cache is empty: nothing of earlier adapters is found there."""
        self._meant.clear()
        self._ambiguous.clear()

    def reported(self, by_rank: dict[int, tuple[int, dict[int, str]]]) -> None:
        """What ranks have loaded now, and which question that answers."""
        if not by_rank:
            return
        before = self._answered()
        self._by_rank.update(by_rank)
        for number, keys in self._keys.items():
            if adapter := self._loaded(number):
                for key in keys:
                    self._if_unambiguous(key, adapter)
        for number, one in list(self._unloaded.items()):
            if self._is_loaded(number):
                adapter = self._loaded(number)
                if adapter and 0 < one.asked <= before:  # it was loaded after its files were digested
                    self._remember(one, adapter)
                del self._unloaded[number]

    # ---- asked for a request -----------------------------------------------------------------

    def meet(self, lora: Any) -> None:
        """A request with this adapter is in the engine."""
        self._keys.setdefault(lora.lora_int_id, set()).add(_key(lora))
        known: tuple[dict[Any, Any], ...] = (self._keys, self._meant, self._unloaded)
        for of_adapters in known:
            while len(of_adapters) > ADAPTERS_KNOWN_MAX:
                of_adapters.pop(next(iter(of_adapters)))

    def to_load(self, lora: Any, base: bytes) -> tuple[bool, Adapter | None]:
        """Whether it is known what the request will be computed with, and what that is; None where it is not to be
        looked up. lora: vLLM's LoRARequest. base: names the namespaces without an adapter."""
        if not self._is_served(lora):
            return True, None
        number, path = lora.lora_int_id, lora.lora_path
        if self._is_loaded(number):
            return True, self.to_save(lora)
        one, stamp = self._unloaded.get(number), _stamp(path)
        if not stamp:  # nothing to wait for
            return True, None
        if one is None or (one.path, one.stamp, one.base) != (path, stamp, base):
            one = self._unloaded[number] = _Unloaded(path, stamp, base, self._digest(path))
        files = one.files.wait(0)
        if files is not None and not one.asked:
            one.asked = next(self._numbers)
        if one.files.running or one.asked > self._answered():
            return time.monotonic() >= one.until_s, None
        if files is None:
            return True, None
        adapter = self._remembered(number, files, base)
        return True, adapter and self._if_unambiguous(_key(lora), adapter)

    def to_save(self, lora: Any) -> Adapter | None:
        """What the request is computed with, as far as the ranks have said; None where nothing may be saved of it."""
        adapter = self._loaded(lora.lora_int_id) if self._is_served(lora) else None
        return adapter and self._if_unambiguous(_key(lora), adapter)

    def _is_served(self, lora: Any) -> bool:
        reason = ""
        if self._sees:
            reason = "they change what images are to the model"
        elif any("" in loaded.values() for _, loaded in self._by_rank.values()):
            reason = "the ranks do not see them"
        if reason:
            self._say(f"requests with adapters are neither looked up nor saved: {reason}")
        return not reason and _key(lora) not in self._ambiguous

    def _if_unambiguous(self, key: Key, adapter: Adapter) -> Adapter | None:
        if self._meant.setdefault(key, adapter.digests) == adapter.digests:
            return adapter
        if key in self._ambiguous:
            return None
        self._ambiguous.add(key)
        self._say(
            f"adapter {key[0]} has other weights than before under the same name and path: its requests are"
            " neither looked up nor saved until the prefix cache is reset; use a new name"
        )
        return None

    # ---- what is known -----------------------------------------------------------------------

    def _answered(self) -> int:
        """The last question that all ranks have answered."""
        if len(self._by_rank) < self._world:
            return 0
        return min(answer for answer, _ in self._by_rank.values())

    def _is_loaded(self, number: int) -> bool:
        """Whether any rank has it."""
        return any(number in loaded for _, loaded in self._by_rank.values())

    def _loaded(self, number: int) -> Adapter | None:
        if len(self._by_rank) < self._world:
            return None
        digests = tuple(self._by_rank[rank][1].get(number, "") for rank in sorted(self._by_rank))
        return Adapter(number, digests) if all(digests) else None

    # ---- files, and what is remembered of them -------------------------------------------------

    def _digest(self, path: str) -> DigestInBackground:
        return DigestInBackground(lambda stop: self._files_digest(path, stop), lambda _: None)

    def _files_digest(self, path: str, stop: Event) -> str:
        files = _files(path)
        if not files:
            raise WeightsUnknown(f"no adapter under {path}")
        return weights_digest(files, self._cache, stop)

    def _place(self, files: str, base: bytes) -> Path:
        return self._cache / "weights" / f"adapter-{xxhash.xxh3_128_hexdigest(files.encode() + base)}.json"

    def _remembered(self, number: int, files: str, base: bytes) -> Adapter | None:
        said = read_note(self._place(files, base)).get("digests", ())
        digests = tuple(map(str, said)) if isinstance(said, list) else ()
        return Adapter(number, digests) if len(digests) == self._world and all(digests) else None

    def _remember(self, one: _Unloaded, adapter: Adapter) -> None:
        """Write down what became of its files, if they are what they were before it was loaded."""
        before = one.files.wait(0)

        def work(stop: Event) -> str:
            if before is not None and self._files_digest(one.path, stop) == before:
                write_note(self._place(before, one.base), {"digests": list(adapter.digests)})
            return ""

        self._noting = [noting for noting in self._noting if noting.running]
        self._noting.append(DigestInBackground(work, lambda _: None))


def _key(lora: Any) -> Key:
    return lora.lora_name, lora.lora_path


def _files(path: str) -> list[Path]:
    """What vLLM loads of an adapter's directory; nothing where it is not one."""
    directory = Path(path).expanduser()
    weights = [directory / name for name in _WEIGHTS if (directory / name).is_file()]
    return [directory / "adapter_config.json", weights[0]] if weights else []


def _stamp(path: str) -> list[Facts]:
    try:
        return [file_facts(file) for file in _files(path)]
    except OSError:
        return []


# ---- on a rank ---------------------------------------------------------------------------


class LiveAdapters:
    """What one rank computes with now: what vLLM has loaded, wherever it came from. Each adapter is digested as it lies in
    memory, once for each time it was loaded: every tensor, and every number that belongs to it."""

    def __init__(self, models: Iterable[Any], rank: int) -> None:
        found = (getattr(model, "lora_manager", None) for model in models)
        self._manager = next((manager for manager in found if manager is not None), None)
        self._rank = rank
        self._known: dict[int, tuple[Any, str]] = {}

    def digests(self) -> dict[int, str]:
        """By the number that the adapter has in the engine; "" for one that holds what we cannot digest, and for the
        number 0, which no adapter has, where we cannot see any."""
        if self._manager is None:
            return {0: ""}
        now: dict[int, tuple[Any, str]] = {}
        for number, adapter in self._manager.list_adapters().items():
            known = self._known.get(number)
            now[number] = (
                known if known is not None and known[0] is adapter else (adapter, _live_digest(adapter))
            )
        self._known = now
        return {number: digest for number, (_, digest) in now.items()}

    def agrees(self, adapter: Adapter | None) -> bool:
        """Whether nothing else is loaded under its number."""
        if adapter is None:
            return True
        expected = adapter.digests[self._rank]
        return self.digests().get(adapter.number, expected) == expected


def _live_digest(adapter: Any) -> str:
    """Empty for one that holds what is neither a tensor nor plain."""
    digest = xxhash.xxh3_128()
    try:
        _add(digest, {name: value for name, value in vars(adapter).items() if name != "id"})
    except TypeError:
        return ""
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Raises TypeError for what is neither a tensor nor plain."""
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy())
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key!r} ".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, str | int | float):
        digest.update(f"{value!r} ".encode())
    elif type(value).__module__.startswith("vllm.lora."):
        digest.update(f"{type(value).__name__} ".encode())
        _add(digest, vars(value))
    else:
        raise TypeError(type(value).__name__)
