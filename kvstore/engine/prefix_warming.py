"""Bringing one prefix into DRAM because an operator named it, ahead of any request.

    hash ─▶ its chain, from the first block on ─▶ batch by batch: a prefetch ─▶ all of it came: the next one
              │ the index knows the chain of what a tier holds,             ╰▶ not: the rest is `gone`, `failed` or `refused`
              ╰ the bucket of its own

Whoever asks asks again until all is over; a batch is begun only when asked, so that a command that is interrupted stops.
As every prefetch it comes behind what engines wait for. Unlike an order for a region it may displace what is used less. What
comes counts as used now, or the end of a long prefix would make its own beginning leave.

Called from the engine's thread only; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.constants import (
    STEP_BLOCKS,
    STEP_SLOW_BLOCKS,
    WARM_BYTES_MAX,
    WARM_NAMESPACES_MAX,
    WARM_RECORDS_MAX,
)
from kvstore.engine.parts import Parts
from kvstore.engine.prefetching import prefetch_steps
from kvstore.errors import BadRequest, NotFound, NotReady
from kvstore.index.block import Block, Namespace
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.steps import Steps


class _Run(Prefetch):
    """The prefix in one namespace, and what waits for its blocks. hashes: its chain. batch: what was asked for last. ready: of
    that, in DRAM. trouble: what some of it met on its way. why: so it ended, `gone`, `failed` or `refused`."""

    def __init__(self, namespace: Namespace, hashes: Sequence[bytes], used: Callable[[Block], None]) -> None:
        super().__init__()
        self.namespace = namespace
        self.hashes = hashes
        self.batch: Sequence[bytes] = ()
        self.next = self.ready = self.held = self.loaded = self.under_way = 0
        self.trouble = self.why = ""
        self._used = used

    def __call__(self, block: Block | None, /) -> None:
        if block is None:
            self.trouble = self.trouble or "failed"
        elif block.where & IN_DRAM:
            self._used(block)

    def waits_for_room(self) -> bool:
        self.trouble = "refused"  # asked only where there was none
        return False

    @property
    def left(self) -> int:
        """Blocks that are still to be asked for."""
        return 0 if self.why else len(self.hashes) - self.next

    def missing(self, why: str) -> int:
        """Blocks that do not come because of this."""
        return len(self.hashes) - self.held - self.loaded if self.why == why else 0


def chain_steps(block: Block | None) -> Steps[list[Block]]:
    """All before a block, and itself, the first one first; nothing where one of them leaves meanwhile."""
    above: list[Block] = []
    while block is not None:
        if len(above) % STEP_BLOCKS == 0:
            if above:
                yield
            if block.namespace.blocks.get(block.hash) is not block:
                return []
        above.append(block)
        block = block.parent
    above.reverse()
    return above


def known_steps(
    spaces: Sequence[Namespace], selector: str, block_hash: bytes
) -> Steps[tuple[list[Block], list[Namespace]]]:
    """Of the namespaces whose digest begins so: the block in each where the index knows it, and those where it does not."""
    found: list[Block] = []
    others: list[Namespace] = []
    for looks, space in enumerate(spaces, 1):
        if looks % STEP_SLOW_BLOCKS == 0:
            yield
        if space.hash_bytes == len(block_hash) and space.digest.hex().startswith(selector):
            block = space.blocks.get(block_hash)
            if block is not None:
                found.append(block)
            else:
                others.append(space)
    return found, others


class PrefixWarming:
    """One prefix, in all namespaces that hold it. selector: the beginning of their digests. clock: as the engine's."""

    def __init__(self, engine: Parts, selector: str, block_hash: bytes, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._selector = selector
        self._hash = block_hash
        self._clock = clock
        self._runs: list[_Run] = []
        self._is_begun = self._is_asking = False

    def go_on(self) -> Steps[dict[str, object]]:
        """Begin what may begin now; how far it is. docs/cli.md names the fields. Raises BadRequest, NotFound, NotReady."""
        if not self._is_begun:
            if not self._engine.adoption.done:
                raise NotReady("the rows of NVMe are still being read; warm again in a moment")
            self._is_begun = True
            yield from self._find()
        if len(self._runs) > WARM_NAMESPACES_MAX:
            raise BadRequest(
                f"prefix {self._hash.hex()}: more than {WARM_NAMESPACES_MAX} namespaces have it: name one with --namespace"
            )
        if not self._runs and not self._is_asking:
            raise NotFound(
                f"prefix {self._hash.hex()}: neither a tier of this node nor the region's bucket has it"
            )
        for run in self._runs:
            yield from self._go_on(run)
            if run.under_way:
                break  # its turn goes on
        return self._report()

    def _report(self) -> dict[str, object]:
        runs = self._runs
        report: dict[str, object] = {
            name: sum(getattr(run, name) for run in runs) for name in ("held", "loaded", "under_way", "left")
        }
        for why in ("failed", "refused", "gone"):
            report[why] = sum(run.missing(why) for run in runs)
        report["namespaces"] = [run.namespace.digest.hex() for run in runs]
        report["blocks"] = sum(len(run.hashes) for run in runs)
        report["bytes"] = sum(len(run.hashes) * run.namespace.record_bytes for run in runs)
        report["loaded_bytes"] = sum(run.loaded * run.namespace.record_bytes for run in runs)
        report["is_over"] = not (self._is_asking or report["under_way"] or report["left"])
        return report

    # -- the chain --

    def _find(self) -> Steps[None]:
        """Of blocks that the index knows; of the other namespaces the bucket is asked, and answers by itself."""
        blocks, others = yield from known_steps(list(self._engine.namespaces), self._selector, self._hash)
        levels = [source.level for source in self._engine.loader.shared if not source.level.is_far]
        if others and levels:
            self._is_asking = True
            digests = [space.digest for space in others]
            levels[0].chains(digests, self._hash, WARM_NAMESPACES_MAX + 1, self._bucket_answered)
        for block in blocks[: WARM_NAMESPACES_MAX + 1]:
            if above := (yield from chain_steps(block)):
                self._runs.append(_Run(block.namespace, [one.hash for one in above], self._used))

    def _bucket_answered(self, chains: Mapping[bytes, Sequence[bytes]]) -> None:
        self._is_asking = False
        for digest, hashes in chains.items():
            namespace = self._engine.namespaces.of_key(digest)
            if namespace is not None:
                self._runs.append(_Run(namespace, hashes, self._used))

    # -- blocks --

    def _go_on(self, run: _Run) -> Steps[None]:
        """Look at the batch that was asked for; ask for the next one where nothing of it is on its way any more."""
        engine, namespace = self._engine, run.namespace
        while True:
            missing = self._missing(run)
            ready = len(run.batch) - len(missing)
            run.loaded += ready - run.ready
            run.ready = ready
            run.under_way = engine.loader.coming(namespace, run.batch)
            if not run.under_way and (missing or namespace.is_ended):
                was_displaced = any(block is not None and block.where & IN_ANY for block in missing)
                run.why = run.trouble or ("refused" if was_displaced else "gone")
            if run.under_way or not run.left:
                return
            parent = run.hashes[run.next - 1] if run.next else b""
            size = max(1, min(WARM_RECORDS_MAX, WARM_BYTES_MAX // namespace.record_bytes))
            run.batch = run.hashes[run.next : run.next + size]
            run.next += len(run.batch)
            run.ready = len(run.batch) - len(self._missing(run))
            run.held += run.ready
            yield from prefetch_steps(engine, namespace, b"".join(run.batch), parent, run)

    def _missing(self, run: _Run) -> list[Block | None]:
        """What DRAM has not of its batch."""
        is_ready, found = self._engine.loader.is_ready, run.namespace.blocks.get_run(run.batch)
        return [block for block in found if block is None or not is_ready(block)]

    def _used(self, block: Block) -> None:
        prompt = self._engine.prompts.recall(block.namespace.id, 0, 1)
        self._engine.blocks.touched([block], prompt, self._clock())
