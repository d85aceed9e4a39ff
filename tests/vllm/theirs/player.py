"""Our connector, played into the places where vLLM's own tests have another one.

    their test ── "this many tokens are matched" ─▶ Script ── so many blocks ─▶ FakeStore
        │                                                                         ▲
        └── vLLM's scheduler ── hooks ─▶ Player (KVStoreConnector) ── lookup ─────┘
                                  └─ must answer what the script says, or the test fails

Their tests say what the connector answers: by a mock in its place, or by settings of a connector made for tests. Here
nothing is mocked: what the test says becomes the content of the store, and ours finds it there. What a test would
have a mock record (`call_count`, `assert_called_once_with`) is recorded around ours.

Their tests have no workers, only what workers report. For saves, of which their tests know nothing, the Player reports
that they are through: at once, or, for a request that is to be sent elsewhere, when the test says that it was sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from connectors.vllm import KVStoreConnector
from connectors.vllm.messages import GroupFacts, Orders, Rank, Report
from tests.vllm.fake_client import FakeStore

RECORD_BYTES = 64
Answer = tuple[int | None, bool]
Script = Callable[[Any, int], Answer]


class OtherAnswerError(Exception):
    """Ours does not answer what the test says that its connector answers."""


class Stage:
    """One test: the store that ours finds, the connectors made, and what was called of them."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.players: list[Player] = []
        self.calls: dict[str, int] = {}
        self.class_calls = 0  # what vLLM's configuration asked of the class
        self.bugs: list[str] = []
        self.declined: list[str] = []

    def called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def close(self) -> None:
        for player in self.players:
            player.shutdown()


stage = Stage()  # of the test that runs


def new_stage() -> Stage:
    global stage
    stage = Stage()
    return stage


class Hook:
    """A hook of ours where the test wants a mock: it takes what the test sets, and records calls.

    script: what the test set is given to it with each call. Otherwise ours must answer what the test set."""

    def __init__(self, ours: Callable[..., Any], record: Mock | None = None, is_script: bool = False) -> None:
        self.__dict__.update(_ours=ours, _record=record or Mock(), _is_script=is_script)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        said = self._record(*args, **kwargs)
        if self._record._mock_wraps is not None:
            return said  # the test only listens: that was ours
        is_said = not isinstance(said, Mock)
        if self._is_script:
            return self._ours(*args, said=said if is_said else None)
        answer = self._ours(*args, **kwargs)
        if is_said and answer != said and (answer or said):
            raise OtherAnswerError(f"ours answers {answer}, the test's connector {said}")
        return answer

    @property  # type: ignore[misc]
    def __class__(self) -> type[Mock]:  # type: ignore[override]
        return Mock  # for isinstance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._record, name, value)


class Player(KVStoreConnector):
    """Ours, for a configuration that names another connector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        theirs = vllm_config.kv_transfer_config
        extra = theirs.kv_connector_extra_config or {}
        self._replaced = theirs.kv_connector
        # Its mock answers by settings that a test may change; NIXL's parameters come with the request.
        self.config: Any = None
        if "matched_tokens" in extra:
            self.config = _mock_config(extra)
        self._asked_before: dict[str, int] = {}
        self._fetched: set[str] = set()
        self._sent: dict[int, str] = {}
        self._due = Report()
        # A copy, as under MultiConnector: ours asks for kv_load_failure_policy=recompute, and a test that says
        # "fail" means it.
        config = copy.copy(vllm_config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="connectors.vllm",
            kv_role="kv_both" if theirs.kv_connector == "NixlConnector" else theirs.kv_role,
            kv_load_failure_policy=theirs.kv_load_failure_policy,
            kv_connector_extra_config={"model_digest": "theirs"},
        )
        super().__init__(config, role, kv_cache_config)
        stage.players.append(self)
        if role is KVConnectorRole.SCHEDULER:
            self._introduce_ranks()
            storing = self._half._storing
            send = storing.send
            storing.send = lambda store, at_once: send(store, True)  # tests look at each step

    def _introduce_ranks(self) -> None:
        half = self._half
        groups = () if half._spaces.plan is None else half._spaces.plan.groups
        facts = {group.index: GroupFacts(RECORD_BYTES, {"of": "theirs"}) for group in groups}
        half._spaces.know_ranks([Rank(shard, facts) for shard in range(half._world)])

    # ---- what is matched -----------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Tests put mocks in the place of hooks: ours stays, and plays what they say."""
        if isinstance(value, Mock) and callable(getattr(type(self), name, None)):
            value = self._hook(name, value)
        object.__setattr__(self, name, value)

    def _hook(self, name: str, record: Mock | None = None) -> Hook:
        if name == "get_num_new_matched_tokens":
            return Hook(self._matched, record, is_script=True)
        return Hook(getattr(type(self), name).__get__(self), record)

    def become_mock(self, mock: Mock) -> None:
        """Every hook takes what a test sets on this mock, and is recorded there."""
        for name in HOOKS:
            object.__setattr__(self, name, self._hook(name, getattr(mock, name)))
        # Tests know request_finished, and vLLM calls the other one of a connector like ours. Their mocks keep no
        # block of a request that is finished; ours may, for its saves.
        finished = super().request_finished_all_groups

        def record_finished(request: Any, block_ids: Any) -> Any:
            mock.request_finished(request, block_ids)
            return finished(request, block_ids)

        object.__setattr__(self, "request_finished_all_groups", record_finished)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        return self._matched(request, num_computed_tokens)

    def _matched(self, request: Any, local_tokens: int, said: Answer | None = None) -> Answer:
        if said is None:
            said = self._says(request, local_tokens)
        if said is None:
            return super().get_num_new_matched_tokens(request, local_tokens)
        tokens, is_async = said
        if tokens is None:
            answer = self._unintroduced(request, local_tokens)
        else:
            self._hold(request, local_tokens + tokens)
            if request.skip_reading_prefix_cache:
                tokens = 0  # which a mock does not know
            if tokens:
                self._half._sync = self._half._lookups._computes_last = (
                    not is_async and self._half._may_load_synchronously()
                )
            answer = super().get_num_new_matched_tokens(request, local_tokens)
        if answer[0] != tokens or (tokens and answer[1] != is_async):
            raise OtherAnswerError(f"ours answers {answer}, the test's connector {tokens, is_async}")
        return answer

    def _says(self, request: Any, local_tokens: int) -> Answer | None:
        """What the connector in whose place ours is would answer; None for one that is not scripted."""
        if self.config is not None:
            asked = self._asked_before.get(request.request_id, 0)
            self._asked_before[request.request_id] = asked + 1
            if asked < self.config.num_defers_before_matching:
                return None, False
            return self.config.matched_tokens, self.config.is_async
        if self._replaced == "NixlConnector":
            remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
            if not remote or request.request_id in self._fetched:
                return 0, False
            blocks = (
                len(request.block_hashes) - local_tokens // self._hash_tokens
            )  # whole ones: ours has no others
            return blocks * self._hash_tokens, blocks > 0
        return None

    @property
    def _hash_tokens(self) -> int:
        return int(self._half._spaces.plan.hash_tokens)

    def _unintroduced(self, request: Any, local_tokens: int) -> Answer:
        """Ours puts a request off as long as the ranks are unknown."""
        spaces = self._half._spaces
        ranks, spaces._ranks = spaces._ranks, []
        try:
            return super().get_num_new_matched_tokens(request, local_tokens)
        finally:
            spaces._ranks = ranks

    def _hold(self, request: Any, tokens: int) -> None:
        """Let the store hold the blocks of the first `tokens` of the request, and no more of it."""
        spaces = self._half._spaces
        if spaces.plan is None or not spaces.ready():
            return
        for group in spaces.plan.groups:
            digest = spaces.columns[group.index].space.digest
            hashes = spaces.plan.hashes(
                group, request.block_hashes, 0, request.num_tokens // group.block_tokens
            )
            for at, name in enumerate(hashes):
                key = (digest, bytes(name))
                if (at + 1) * group.block_tokens <= tokens:
                    stage.store.records.setdefault(key, bytes(RECORD_BYTES))
                else:
                    stage.store.records.pop(key, None)
        tracked = self._half._requests.get(request.request_id)
        if tracked is not None:
            tracked.hit = None  # the answer that ours remembers is of the store as it was

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._fetched.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    # ---- the workers ---------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(_orders(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(_orders(connector_metadata))

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        requests = self._half._requests
        later = Report(loads={load.number: (1, len(load.block_ids)) for load in orders.loads})
        later.sync_step = orders.sync_step
        at_once = Report()
        owners = {
            number: store.request_id for store in self._half._storing.stores.values() for number in store.open
        }
        for save in orders.saves:
            owner = owners[save.number]
            params = requests[owner].request.kv_transfer_params if owner in requests else None
            if (params or {}).get("do_remote_decode"):
                self._sent[save.number] = owner
            else:
                at_once.saves[save.number] = (1, 0, True)
            grant: Any = save.grant  # a FakeGrant
            lease = stage.store.leases[grant.number]
            assert lease is not None
            lease.release()
        if not at_once.is_empty():
            super().update_connector_output(KVConnectorOutput(kv_connector_worker_meta=at_once))
        self._due.aggregate(later)
        # Mocks of theirs list the requests that start, and tests count them: that says nothing of ours.
        cached = scheduler_output.scheduled_cached_reqs
        starting = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        starting += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        orders.requests = [{"req_id": name} for name in starting]
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is None:
            sent = set(connector_output.finished_sending or ())
            for number in [number for number, owner in self._sent.items() if owner in sent]:
                del self._sent[number]
                self._due.saves[number] = (1, 0, True)
            connector_output = copy.copy(connector_output)
            connector_output.kv_connector_worker_meta, self._due = self._due, Report()
        super().update_connector_output(connector_output)

    def get_kv_connector_stats(self) -> Any:
        """vLLM asks at the end of every step: workers report with each, tests only where they have something to say."""
        if not self._due.is_empty():
            self.update_connector_output(KVConnectorOutput())
        return super().get_kv_connector_stats()


def _orders(metadata: Any) -> Orders:
    """Tests of the workers' side hand on anything."""
    return metadata if isinstance(metadata, Orders) else Orders()


def _mock_config(extra: dict[str, Any]) -> Any:
    from tests.v1.kv_connector.unit.utils import MockKVConfig  # type: ignore[import-untyped]  # theirs

    return MockKVConfig(
        matched_tokens=extra["matched_tokens"],
        is_async=extra["is_async"],
        num_defers_before_matching=extra.get("num_defers_before_matching", 0),
    )


def _hooks() -> Iterable[str]:
    """The methods that vLLM calls on an instance."""
    for name in dir(KVConnectorBase_V1):
        if name.startswith("_") or not callable(getattr(KVConnectorBase_V1, name)):
            continue
        if not isinstance(KVConnectorBase_V1.__dict__.get(name), classmethod):
            yield name
    yield "request_finished_all_groups"


HOOKS = sorted(_hooks())


def _count_calls() -> None:
    """Calls of ours are counted where they reach KVStoreConnector."""

    def counted(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            stage.called(name)
            return hook(self, *args, **kwargs)

        return call

    for name in HOOKS:
        if name in KVStoreConnector.__dict__:
            setattr(KVStoreConnector, name, counted(name, KVStoreConnector.__dict__[name]))


_count_calls()
