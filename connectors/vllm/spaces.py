"""The namespaces of an engine: one for each KV group, known as soon as all that names them is.

    the plan of the groups ─┐
    digest of the weights ──┼─▶ columns: group ─▶ namespace, and each shard's part of its records
    what the ranks say ─────┘

When the cache is reset the weights may be others, before the reset or after it. What counts is what the first
request afterwards is computed with: when it asks, the ranks digest their weights, and until all have answered nothing is
looked up or saved.

    the weights are those of the start   the first namespaces: the store is as warm as before
    they are others                      namespaces named by the joined digest: shared by all engines that have them,
                                         also by those that are started from files of them, where a note says so
    they cannot be seen                  namespaces of an `epoch` drawn at random: ours alone, so that we end them
                                         at the next reset, once nothing is saved to them any more
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm.v1.core import kv_cache_utils

from connectors import constants as limits
from connectors.constants import MIB
from connectors.transfer.link import Line
from connectors.transfer.orders import Adapter, Column, Columns
from connectors.transfer.settings import Settings
from connectors.transfer.weights import DigestInBackground, default_cache_dir, known_as, weights_digest
from connectors.vllm.geometry import Plan, Unsupported, plan_for
from connectors.vllm.guard import Guard, logger
from connectors.vllm.identity.canonical import Unknowable
from connectors.vllm.identity.model_files import weight_files
from connectors.vllm.identity.namespace import (
    configured_fields,
    identity_fields,
    joined_facts,
    model_fields,
    space_spec,
)
from connectors.vllm.messages import Rank, Weights, this_node
from kvstore.client import ClientError, Namespace

EPOCHS_OWED_MAX = 64  # resets whose namespaces are not ended yet; beyond it the daemon drops them in time
LEASE_BYTES_MAX = 64 * MIB  # of one reserve or acquire, that one rank copies (at least one block)
# The engine's start waits this long for the digest; then it goes on in the background.
WEIGHTS_START_WAIT_S = 10.0
ADAPTERS_MAX = 256  # of LoRA, that are stored by one engine: each has namespaces of its own


class Spaces:
    """plan: of the model's groups; None once it is known that they are not stored. columns: by group, empty while the
    namespaces are not known. shards: what each has of a record, by group; the same in all namespaces. base: names those
    without an adapter. version: resets of the cache until now."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, line: Line, guard: Guard
    ) -> None:
        self._settings, self._config, self._line, self._guard = settings, vllm_config, line, guard
        self._world = int(vllm_config.parallel_config.world_size)
        self.plan: Plan | None = None
        self._configured: dict[str, str] = {}
        try:
            plan = plan_for(kv_cache_config, vllm_config)
            self._configured = configured_fields(vllm_config)
            self.plan = plan
        except (Unsupported, Unknowable) as reason:
            self._decline(reason)
        self.columns: dict[int, Columns] = {}
        self.shards: dict[int, dict[int, Column]] = {}
        self.base = b""
        self._identity: dict[str, str] = {}
        self._hash_bytes = 0
        self._of_adapters: dict[Adapter, dict[int, Columns]] = {}
        self.version = 0
        self._model = model_fields(vllm_config)
        self._no_files = ""  # why files do not name the weights
        self._weights = DigestInBackground(self._digest_weights, self._weights_unknown)
        self._weights.wait(WEIGHTS_START_WAIT_S)
        self._ranks: list[Rank] = []
        self._ranks_due_s, self._asked = 0.0, False
        self._live = Weights()  # of all ranks together
        self._epoch, self._said = "", ""
        self._has_said_connected = False
        # To be ended: the number of the first store that is not theirs, and the namespaces of one epoch.
        self._old: deque[tuple[int, list[Namespace]]] = deque(maxlen=EPOCHS_OWED_MAX)

    @property
    def cache_dir(self) -> Path:
        """Where digests are remembered."""
        return Path(self._settings.cache_dir) if self._settings.cache_dir else default_cache_dir()

    def _decline(self, reason: object) -> None:
        """For good."""
        self.plan = None
        self._guard.say_once(f"this model's KV is not stored: {reason}")

    def close(self) -> None:
        """Stop reading weights."""
        self._weights.close()

    # ---- what names them -----------------------------------------------------------------

    @property
    def knows_ranks(self) -> bool:
        return bool(self._ranks)

    @property
    def asks_ranks(self) -> bool:
        """Whether the ranks are to introduce themselves. After a reset not before a request asks: the weights may be
        replaced until then, and may not even be in memory."""
        return not self._ranks and self.plan is not None and (self._asked or not self.version)

    def know_ranks(self, ranks: list[Rank]) -> None:
        """What the workers said of their blocks and weights; nothing is known before all of them have, since the last
        reset."""
        ranks = [rank for rank in ranks if rank.weights.version == self.version]
        if len(ranks) < self._world:
            return
        self._ranks = ranks
        troubles = {rank.trouble for rank in ranks if rank.trouble}
        if {rank.node for rank in ranks} - {this_node()}:
            troubles.add("its ranks are on several nodes, which one daemon cannot serve")
        if troubles:
            self._decline("; ".join(sorted(troubles)))
        if not self._settings.model_digest:
            self._no_files = self._no_files or next((rank.elsewhere for rank in ranks if rank.elsewhere), "")
        self._live = _live_of(ranks)
        self._epoch = os.urandom(8).hex() if self.version and not self._live.now else ""

    def awaits_ranks(self) -> bool:
        """Asked for a request that can start. Whether all that is missing is what the workers say with the output of
        their next step."""
        self._asked = True
        if self._ranks or self.plan is None or (self._weights.result is None and not self._no_files):
            return False
        now_s = time.monotonic()
        self._ranks_due_s = self._ranks_due_s or now_s + limits.RANKS_WAIT_S
        return now_s < self._ranks_due_s

    def _digest_weights(self, stop: Any) -> str:
        if self._settings.model_digest:
            return self._settings.model_digest
        model = self._config.model_config
        models = [(model, self._config.load_config)]
        drafting: Any = self._config.speculative_config
        draft = drafting and drafting.draft_model_config
        if draft is not None:
            load, is_own = (
                drafting.draft_load_config,
                (draft.model, draft.revision) != (model.model, model.revision),
            )
            if is_own or load is not None:
                models.append((draft, load or self._config.load_config))
        files = [weight_files(*each, stop, self._settings.kvstore_socket) for each in models]
        return " ".join(dict.fromkeys(weights_digest(each, self.cache_dir, stop) for each in files))

    def _weights_unknown(self, error: Exception) -> None:
        self._no_files = str(error)

    def _weights_name(self) -> str | None:
        """What names the weights of now; None while it is not known."""
        live = self._live
        if live.now and live.now != live.first:
            return known_as(self.cache_dir, live.now, f"live {live.now}")
        if not self._no_files:
            named = self._weights.result
            if named is None or not live.first or self._settings.model_digest:
                return named
            return known_as(self.cache_dir, live.first, named)
        if live.first:
            return known_as(self.cache_dir, live.first, f"live {live.first}")
        self._guard.say_once(
            f"the weights cannot be distinguished from others, so nothing is stored or loaded ({self._no_files}; {live.unseen});"
            " set model_digest"
        )
        return None

    # ---- becoming known ------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the namespaces are known; makes them as soon as all that names them is."""
        if self.columns:
            return True
        weights = self._weights_name() if self.plan is not None and self._ranks else None
        seed = getattr(kv_cache_utils, "NONE_HASH", None)
        if self.plan is None or weights is None or seed is None:
            return False
        algorithm = str(self._config.cache_config.prefix_caching_hash_algo)
        if "xxhash" in algorithm and not os.environ.get("PYTHONHASHSEED"):
            self._guard.say_once(
                "block hashes differ from process to process: set PYTHONHASHSEED, or use sha256"
            )
        given = self._config, self._settings.tenant, weights, bytes(seed), self._epoch, self._configured
        self._identity, self._hash_bytes = identity_fields(*given) | self._model, len(seed)
        try:
            self.columns = self._make_columns(self.plan)
        except ClientError as reason:
            self._decline(reason)
            return False
        self.shards = {index: columns.of_shard for index, columns in self.columns.items()}
        self.base = b"".join(columns.space.digest for columns in self.columns.values())
        self._say_change()
        return True

    def of_adapter(self, adapter: Adapter) -> dict[int, Columns]:
        """The namespaces of what is computed with it; empty where there are too many. Only when `ready`."""
        known = self._of_adapters.get(adapter)
        if known is None and self.plan is not None:
            if len(self._of_adapters) >= ADAPTERS_MAX:
                self._guard.say_once(f"of adapters, the first {ADAPTERS_MAX} are stored")
                return {}
            known = self._of_adapters[adapter] = self._make_columns(self.plan, adapter)
        return known or {}

    def _make_columns(self, plan: Plan, adapter: Adapter | None = None) -> dict[int, Columns]:
        """One namespace for each group: its records have a column for each shard, in the order of shards. Raises
        Refused where there are more columns than a record may have."""
        made: dict[int, Columns] = {}
        identity = self._identity if adapter is None else {**self._identity, "adapter": adapter.name}
        for group in plan.groups:
            ranks = [rank for rank in self._ranks if group.index in rank.groups]
            facts = dict(sorted((rank.shard, rank.groups[group.index]) for rank in ranks))
            sizes = [shard.record_bytes for shard in facts.values()]
            tokens = group.block_tokens
            digest, fields = space_spec({**identity, **joined_facts(facts)}, sizes, tokens)
            client, hash_bytes = self._line.client, self._hash_bytes
            space = client.namespace(digest, sum(sizes), hash_bytes, tokens, fields, columns=sizes)
            starts = enumerate(itertools.accumulate(sizes, initial=0))
            of_shard = {shard: Column(*start) for shard, start in zip(facts, starts, strict=False)}
            lease_blocks = max(1, min(limits.LEASE_BLOCKS_MAX, LEASE_BYTES_MAX // max(sizes)))
            made[group.index] = Columns(group.index, space, of_shard, lease_blocks, adapter)
        return made

    # ---- other weights -------------------------------------------------------------------

    def new_epoch(self, next_store: int, under_way: Collection[int]) -> None:
        """The weights may be others from now on. next_store: the number of the first save that is not of the
        namespaces until now. under_way: the numbers of saves that are not through.

        Only a namespace of an epoch of our own is ended; the others are those of all engines with these weights.
        """
        if self._epoch and self.columns:
            groups = [each for of in (self.columns, *self._of_adapters.values()) for each in of.values()]
            self._old.append((next_store, [group.space for group in groups]))
            self.end_old(under_way)
        self.version += 1
        self.columns, self._of_adapters = {}, {}
        self._asked, self._ranks_due_s = False, 0.0
        if self._ranks and not self._live.first:  # could not be seen at the start: not looked at again
            self._epoch = os.urandom(8).hex()
        elif self.plan is not None:
            self._ranks, self._epoch = [], ""

    def _say_change(self) -> None:
        """One line for each epoch: what its weights are, what they were, and why."""
        now, why = "those of the start", ""
        if self._epoch:
            now = f"own epoch {self._epoch}"
            why = f"they cannot be distinguished from others ({self._live.unseen}), so no other engine finds what is stored"
        elif self._live.now != self._live.first:
            now = f"live {self._live.now}"
            why = "they were replaced: engines with the same weights share what is stored"
        same, was, self._said = now == self._said, self._said, now
        if self.version:
            why = why if not same or self._epoch else "they are the same: the store stays warm"
            why = why or "they are those of the start again: the store is warm"
            logger.info("kvstore: cache reset %d: weights: %s (before: %s): %s", self.version, now, was, why)

    def say_connected(self) -> None:
        """One line for each engine, once its daemon answers and its namespaces are known."""
        if self._has_said_connected:
            return
        self._has_said_connected = True
        spaces = [columns.space for columns in self.columns.values()]
        logger.info(
            "kvstore: connected: socket %s, instance %s, model %s, tenant %s, records of %s, ranks %d",
            self._settings.kvstore_socket,
            self._line.client.instance,
            spaces[0].fields.get("model", ""),
            spaces[0].fields.get("tenant", "") or "(none)",
            ", ".join(f"{space.record_bytes:,} bytes for {space.block_tokens} tokens" for space in spaces),
            self._world,
        )
        if self.plan is not None and not self.plan.lasting:
            logger.info(
                "kvstore: no bucket keeps what this model stores: only some of its blocks have a state"
            )

    def end_old(self, under_way: Collection[int]) -> None:
        """End namespaces that will not be read again, once nothing is saved to them any more."""
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


def _live_of(ranks: list[Rank]) -> Weights:
    """What all ranks together compute with."""
    said = [rank.weights for rank in sorted(ranks, key=lambda rank: rank.number)]
    return Weights(
        _joined([weights.first for weights in said]),
        _joined([weights.now for weights in said]),
        unseen="; ".join(sorted({weights.unseen for weights in said if weights.unseen})),
    )


def _joined(digests: list[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32] if all(digests) else ""
