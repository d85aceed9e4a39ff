"""The namespaces of an engine: one for each KV group, known as soon as all that names them is.

    the plan of the groups ─┐
    digest of the weights ──┼─▶ columns: group ─▶ namespace, and each shard's part of its records
    what the ranks say ─────┘

When the cache is reset the weights may be others: the namespaces get a new `epoch`, and end with the
next one, once nothing is saved to them any more.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Collection
from typing import Any

from connectors import constants as limits
from connectors.transfer.link import Line
from connectors.transfer.orders import Column, Columns
from connectors.transfer.settings import Settings
from connectors.transfer.weights import DigestInBackground, default_cache_dir, weight_files, weights_digest
from connectors.vllm.geometry import Plan, Unsupported, plan_for
from connectors.vllm.guard import Guard
from connectors.vllm.messages import Rank, this_node
from connectors.vllm.namespace import identity_fields, joined_facts, space_spec
from kvstore.client import ClientError, Namespace


class Spaces:
    """plan: of the model's groups; None once it is known that they are not stored. columns: by group, empty while
    the namespaces are not known. version: of the namespaces."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, line: Line, guard: Guard
    ) -> None:
        self._settings, self._config, self._line, self._guard = settings, vllm_config, line, guard
        self._world = int(vllm_config.parallel_config.world_size)
        self.plan: Plan | None = None
        try:
            self.plan = plan_for(kv_cache_config, vllm_config)
        except Unsupported as reason:
            guard.say_once(f"this model's KV is not stored: {reason}")
        self.columns: dict[int, Columns] = {}
        self.version = 0
        self._weights = DigestInBackground(self._digest_weights, self._weights_unknown)
        self._weights.wait(limits.WEIGHTS_START_WAIT_S)
        self._ranks: list[Rank] = []
        self._ranks_due_s, self._epoch = 0.0, ""
        # To be ended: the number of the first store that is not theirs, and the namespaces of one epoch.
        self._old: deque[tuple[int, list[Namespace]]] = deque(maxlen=limits.EPOCHS_OWED_MAX)

    def close(self) -> None:
        """Stop reading weights."""
        self._weights.close()

    # ---- what names them -----------------------------------------------------------------

    @property
    def knows_ranks(self) -> bool:
        return bool(self._ranks)

    def know_ranks(self, ranks: list[Rank]) -> None:
        """What the workers said of their blocks; nothing is known before all of them have."""
        if len(ranks) < self._world:
            return
        self._ranks = ranks
        troubles = {rank.trouble for rank in ranks if rank.trouble}
        if {rank.node for rank in ranks} - {this_node()}:
            troubles.add("its ranks are on several nodes, which one daemon cannot serve")
        if troubles:
            self.plan = None
            self._guard.say_once(f"this model's KV is not stored: {'; '.join(sorted(troubles))}")

    def awaits_ranks(self) -> bool:
        """Whether all that is missing is what the workers say with the output of their first step."""
        if self._ranks or self.plan is None or self._weights.result is None:
            return False
        now_s = time.monotonic()
        self._ranks_due_s = self._ranks_due_s or now_s + limits.RANKS_WAIT_S
        return now_s < self._ranks_due_s

    def _digest_weights(self, stop: Any) -> str:
        if self._settings.model_digest:
            return self._settings.model_digest
        cache = self._settings.cache_dir
        directory = default_cache_dir() if not cache else type(default_cache_dir())(cache)
        models = [self._config.model_config]
        draft = getattr(getattr(self._config, "speculative_config", None), "draft_model_config", None)
        if draft is not None and draft.model != models[0].model:
            models.append(draft)
        return " ".join(weights_digest(weight_files(m.model, m.revision), directory, stop) for m in models)

    def _weights_unknown(self, error: Exception) -> None:
        self._guard.say_once(
            f"the weights cannot be told from others, so nothing is stored or loaded ({error}); set model_digest"
        )

    # ---- becoming known ------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the namespaces are known; makes them as soon as all that names them is."""
        if self.columns:
            return True
        weights = self._weights.result
        if self.plan is None or weights is None or not self._ranks:
            return False
        from vllm.v1.core import kv_cache_utils

        seed = getattr(kv_cache_utils, "NONE_HASH", None)
        if seed is None:
            return False
        if "xxhash" in str(self._config.cache_config.prefix_caching_hash_algo) and not os.environ.get(
            "PYTHONHASHSEED"
        ):
            self._guard.say_once(
                "block hashes differ from process to process: set PYTHONHASHSEED, or use sha256"
            )
        identity = identity_fields(self._config, self._settings.tenant, weights, bytes(seed), self._epoch)
        try:
            self.columns = self._make_columns(self.plan, identity, len(seed))
        except ClientError as reason:
            self.plan = None
            self._guard.say_once(f"this model's KV is not stored: {reason}")
            return False
        self.version += 1
        return True

    def _make_columns(self, plan: Plan, identity: dict[str, str], hash_bytes: int) -> dict[int, Columns]:
        """One namespace for each group: its records have a column for each shard, in the order of shards. Raises
        Refused where there are more columns than a record may have."""
        made: dict[int, Columns] = {}
        for group in plan.groups:
            facts = {
                rank.shard: rank.groups[group.index] for rank in self._ranks if group.index in rank.groups
            }
            facts = dict(sorted(facts.items()))
            sizes = [shard.record_bytes for shard in facts.values()]
            spec = space_spec({**identity, **joined_facts(facts)}, sizes, group.block_tokens)
            space = self._line.client.namespace(
                spec.digest, spec.record_bytes, hash_bytes, group.block_tokens, spec.fields, columns=sizes
            )
            starts = enumerate(itertools.accumulate(sizes, initial=0))
            of_shard = {shard: Column(*start) for shard, start in zip(facts, starts, strict=False)}
            lease_blocks = max(1, min(limits.LEASE_BLOCKS_MAX, limits.LEASE_BYTES_MAX // max(sizes)))
            made[group.index] = Columns(group.index, space, of_shard, lease_blocks)
        return made

    # ---- other weights -------------------------------------------------------------------

    def new_epoch(self, next_store: int, under_way: Collection[int]) -> None:
        """Nothing stored until now is ours any more. next_store: the number of the first save that is of the new
        namespaces. under_way: the numbers of saves that are not through.

        A namespace that a reset made is ours alone and is ended; the one before the first reset is that of all
        engines with these weights.
        """
        if self._epoch and self.columns:  # the first namespaces are not only ours
            self._old.append((next_store, [group.space for group in self.columns.values()]))
            self.end_old(under_way)
        self._epoch = os.urandom(8).hex()
        self.columns = {}

    def end_old(self, under_way: Collection[int]) -> None:
        """Tell the daemon which namespaces nobody will read again, when nothing is saved to them any more."""
        while self._old:
            next_store, spaces = self._old[0]
            if any(number < next_store for number in under_way):
                return
            try:
                for space in spaces:
                    self._line.client.unregister(space, end=True)
            except ClientError as error:
                self._guard.note("end_namespace", error)
                return
            self._old.popleft()
