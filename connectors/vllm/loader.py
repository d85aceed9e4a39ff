"""Load format `kvstore`: the weights of a revision on this node, verified while they stream, read once for all ranks.

    vllm serve DIRECTORY --load-format kvstore

    DIRECTORY is a whole revision (`kvstore model path`)   read by coldstart/loading/loading.py
              a start directory                            the same, of files that a preload is filling
              one of both, of a model in this node's DRAM  tensors over that memory: coldstart/loading/resident_weights.py
              any other                                    read as by vLLM's default loader, which one line says

It is vLLM's default loader in all but reading: which files count, secondary weights, experts of other ranks, what a model
does not use, the check of what was loaded, and `get_all_weights` for weights that are loaded again. Ranks of one tensor-parallel
group on one node agree on what they read, and share a ring.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files

from coldstart.errors import ModelError
from coldstart.loading.loading import BUFFER_BYTES, THREADS, Loading
from coldstart.loading.resident_weights import ResidentWeights
from coldstart.loading.ring import Ring, SharedRing, make_shared
from coldstart.loading.start_dir import Revision, open_revision
from coldstart.loading.weight_plan import Plan, WeightFile
from connectors.device.movers import weight_pins

_log = logging.getLogger("vllm.kvstore")
ATTACH_S = 5.0  # a daemon that does not answer within it is away
STALLED_S = 10.0  # a model on its way into DRAM that comes no nearer for so long is not waited for
TELL_S = 1.0  # for it to count a load
OWN_KEYS = {
    "buffer_bytes": (BUFFER_BYTES, 1 << 20, 1 << 40),
    "threads": (THREADS, 1, 256),
}  # of model_loader_extra_config: default, least, most


class KVStoreModelLoader(DefaultModelLoader):
    """One of vLLM's model loaders. Raises ModelError with one line where the files are not what was published."""

    def __init__(self, load_config: Any) -> None:
        """Raises ValueError for an unknown key of model_loader_extra_config."""
        usual = copy.copy(load_config)
        given = load_config.model_loader_extra_config
        own = {name: given[name] for name in OWN_KEYS if name in given} if isinstance(given, dict) else {}
        if own:
            usual.model_loader_extra_config = {name: given[name] for name in given if name not in own}
        usual.load_format = "auto"  # which files count is as always
        super().__init__(usual)
        self._buffer_bytes = _number("buffer_bytes", own)
        self._threads = _number("threads", own)

    def _get_weights_iterator(self, source: Any) -> Any:
        with _refusing(source.model_or_path):
            revision = open_revision(Path(source.model_or_path))
            if revision is not None:
                return self._verified(revision, source)
        _log.info(
            "kvstore: %s is no revision of kvstore: read as vLLM's default loader does, nothing is verified",
            source.model_or_path,
        )
        return super()._get_weights_iterator(source)

    def _verified(self, revision: Revision, source: Any) -> Any:
        """Names, with the prefix of the source, and tensors."""
        folder, paths, is_safetensors, index = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if self._encoder_only_lm_prefixes is not None and is_safetensors:
            paths = filter_mm_encoder_only_safetensors_files(
                paths,
                folder,
                index,
                self._encoder_only_lm_prefixes,
                weights_mapper=self._encoder_only_weights_mapper,
            )
        places = [Path(path) for path in in_order(paths)]
        resident = None if self._is_torchao() else in_dram(revision, places, daemon_socket())
        files = resident.files if resident else [revision.weight_file(path) for path in places]
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights: float = time.perf_counter()
        if resident is not None:
            weights = self._look_at(revision, resident, self._wanted(source, files))
            return ((source.prefix + name, tensor) for name, tensor in weights)
        if self._is_given_whole(files):
            for _ in self._load(revision, files, lambda name: True):
                pass  # verified
            return super()._get_weights_iterator(revision.at_home(source))
        weights = self._load(revision, files, self._wanted(source, files))
        return ((source.prefix + name, tensor) for name, tensor in weights)

    def _is_given_whole(self, files: list[WeightFile]) -> bool:
        """Whether the default loader has to read these files itself: they are no safetensors, or not cut at tensors, or
        tensors are made of several ones."""
        return self._is_torchao() or any(not file.tensors for file in files)

    def _is_torchao(self) -> bool:
        return bool(self.load_config.safetensors_load_strategy == "torchao")

    def _wanted(self, source: Any, files: list[WeightFile]) -> Callable[[str], bool]:
        """Which tensors are read: not the weights of experts that other ranks have, and none that the model has no use for."""
        unused = source.is_unused_weight or (lambda name: False)
        if all(unused(tensor.name) for file in files for tensor in file.tensors):
            unused = lambda name: False  # noqa: E731 - as vLLM does it: then all are read

        return lambda name: not should_skip_weight(name, self.local_expert_ids) and not unused(name)

    def _look_at(
        self, revision: Revision, resident: ResidentWeights, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Any]]:
        """Tensors over the memory that the node has a revision in."""
        if self.local_expert_ids is None:
            shared_ring(None)  # others of the group may need one
        begun_s = time.monotonic()
        try:
            with _refusing(revision.name):
                yield from resident.tensors(wanted, weight_pins(_log.warning), ranks_of_group())
        finally:
            resident.close()
            revision.keep()
        seconds = time.monotonic() - begun_s
        _log.info(
            "kvstore: %s: fetched nothing: it was in this node's DRAM · verified when it came there · loaded %s bytes, %.1f s",
            revision.name,
            f"{resident.loaded_bytes:,}",
            seconds,
        )
        report(revision, {"dram": resident.loaded_bytes}, seconds)

    def _load(
        self, revision: Revision, files: list[WeightFile], wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Any]]:
        plan = Plan(files, wanted, self._buffer_bytes)
        ring = shared_ring(plan) if self.local_expert_ids is None else None
        chunks = revision.chunks(plan, ring is None or ring.index == 0)
        loading = Loading(plan, chunks, ring, self._threads, weight_pins(_log.warning))
        begun_s = time.monotonic()
        try:
            with _refusing(revision.name):
                yield from loading.tensors()
        finally:
            revision.close()
        seconds = time.monotonic() - begun_s
        _log.info(
            "kvstore: %s: fetched %s · verified %s, %s of them read by this rank · loaded %.1f s, %.1f s of them waiting for bytes",
            revision.name,
            revision.fetched(),
            f"{plan.size_bytes:,} bytes",
            f"{loading.read_bytes:,} bytes",
            seconds,
            loading.waited_s,
        )
        report(revision, revision.by_source(loading.read_bytes), seconds)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """One line says why a model is not loaded."""
    try:
        yield
    except ModelError as error:
        _log.error("kvstore: %s: not loaded: %s", name, error)
        raise


def _number(name: str, given: dict[str, Any]) -> int:
    default, least, most = OWN_KEYS[name]
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"model_loader_extra_config: {name} = {value!r}: allowed is a number from {least} to {most}"
        )
    return value


def in_order(paths: list[str]) -> list[str]:
    """As vLLM reads files: shard 10 behind shard 9."""
    from vllm.model_executor.model_loader.weight_utils import _natural_sort_key

    return sorted(paths, key=_natural_sort_key)


# ---- the daemon -----------------------------------------------------------------------------


def in_dram(revision: Revision, paths: Sequence[Path], socket: str | None) -> ResidentWeights | None:
    """The weights in these files, where the node has them in DRAM, all of them; None where not, or its daemon is away. While
    they are being brought there this waits, as long as that goes on: reading them a second time would only take from the same
    disk or bucket."""
    from kvstore.client import ClientError, models

    model, name = revision.manifest.model, revision.manifest.revision
    try:
        found = models.attach(model, name, socket, stalled_s=STALLED_S, timeout_s=ATTACH_S)
    except ClientError as reason:
        _log.debug("kvstore: %s: not taken from DRAM: %s", revision.name, reason)
        return None
    try:
        return ResidentWeights(found, revision.manifest, revision.directory, paths)
    except ModelError as reason:
        found.close()
        _log.info("kvstore: %s: not taken from DRAM: %s", revision.name, reason)
        return None


def report(revision: Revision, by_source: Mapping[Any, int], seconds: float) -> None:
    """Have the daemon count a load, if it is there."""
    from kvstore.client import ClientError, models

    model, name = revision.manifest.model, revision.manifest.revision
    with suppress(ClientError):
        models.loaded(model, name, by_source, seconds, daemon_socket(), timeout_s=TELL_S)


def daemon_socket() -> str | None:
    """Where this engine's connector finds the daemon, also below MultiConnector; None: where it is by default."""
    transfer = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    given = getattr(transfer, "kv_connector_extra_config", None) or {}
    children = [child.get("kv_connector_extra_config") or {} for child in given.get("connectors", ())]
    named = (one["kvstore_socket"] for one in (given, *children) if "kvstore_socket" in one)
    return next(named, None)


# ---- ranks ----------------------------------------------------------------------------------


def shared_ring(plan: Plan | None) -> Ring | None:
    """A ring with the other ranks of this tensor-parallel group that lie on this node and read the same; None where there
    are none. All ranks of the group call it at the same place of their loads. plan: None of one that needs no ring."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return None
    mine = group.rank_in_group
    facts = _gathered(group, [_node(), plan.digest() if plan else mine])
    peers = [rank for rank, fact in enumerate(facts) if fact == facts[mine]]
    is_first, path = mine == peers[0], ""
    if plan and is_first and len(peers) > 1:
        try:
            path = str(make_shared(plan.ring_bytes, len(plan.pieces), len(peers)))
        except OSError as error:
            _log.warning("kvstore: no memory that ranks could share (%s): each reads all files", error)
    ring: SharedRing | None = None
    try:
        where = _gathered(group, path)[peers[0]]
        if plan and where:
            ring = SharedRing(Path(where), plan.ring_bytes, len(plan.pieces), peers.index(mine), len(peers))
    except OSError as error:
        _log.warning("kvstore: ranks do not share what they read: %s", error)
    have_it = _gathered(group, ring is not None)
    if path:
        Path(path).unlink(missing_ok=True)
    if ring is not None and not all(have_it[rank] for rank in peers):
        ring.close()
        ring = None
    return ring


def ranks_of_group() -> int:
    """Of this rank's tensor-parallel group."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 1
    return int(parallel_state.get_tp_group().world_size)


def _gathered(group: Any, mine: Any) -> list[Any]:
    import torch

    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


def _node() -> str:
    """Equal where two processes see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    shared = Path("/dev/shm").stat()
    return f"{boot} {shared.st_dev} {shared.st_ino}"
