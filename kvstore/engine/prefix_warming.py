"""Bringing one prefix into DRAM because somebody asked for it by name, ahead of any request.

    hash ─▶ its chain, from the first block on ─┬▶ in DRAM: held            the index knows the chain of what a tier holds,
                                                ├▶ on NVMe, in the bucket: loaded, as a prefetch      the bucket of its own
                                                ╰▶ nowhere: gone, and so is all behind it

Whoever asks asks again until all is over; between two asks nothing is begun, so that a command that is interrupted stops.
Serving goes first: nothing is begun while a load of an engine waits for its turn. Unlike an order for a region this may
displace what is used less: somebody has named the prefix. What is brought counts as used now, or the end of a long
prefix would make its own beginning leave.

Called from the engine's thread only; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvstore.constants import (
    STEP_BLOCKS,
    STEP_SLOW_BLOCKS,
    WARM_BYTES_MAX,
    WARM_NAMESPACES_MAX,
    WARM_RECORDS_MAX,
)
from kvstore.engine.parts import Parts
from kvstore.errors import BadRequest, NotFound, NotReady
from kvstore.index.block import Block, Namespace
from kvstore.movement.sources import SharedSource
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.steps import Steps


class _Wanted(Prefetch):
    """A block of a prefix. refused: there was no room for it."""

    def __init__(self, tell: Callable[[_Wanted, Block | None], None]) -> None:
        super().__init__()
        self.refused = False
        self._tell = tell

    def __call__(self, block: Block | None, /) -> None:
        self._tell(self, block)

    def waits_for_room(self) -> bool:
        self.refused = True  # asked only where there was none
        return False


class _Run:
    """The prefix in one namespace. hashes: its chain."""

    def __init__(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        self.namespace = namespace
        self.hashes = hashes
        self.next = 0
        self.under_way = self.held = self.loaded = self.failed = self.refused = self.gone = 0

    @property
    def left(self) -> int:
        """Blocks that are still to be looked at."""
        return len(self.hashes) - self.next


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
        self._records = self._bytes = 0  # under way

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
            looks = 0
            while run.left and self._may_begin():
                self._begin(run)
                looks += 1
                if looks % STEP_SLOW_BLOCKS == 0:
                    yield
        self._engine.loader.pump()
        return self._told()

    def _told(self) -> dict[str, object]:
        runs = self._runs
        told: dict[str, object] = {
            name: sum(getattr(run, name) for run in runs)
            for name in ("held", "loaded", "under_way", "left", "failed", "refused", "gone")
        }
        told["namespaces"] = [run.namespace.digest.hex() for run in runs]
        told["blocks"] = sum(len(run.hashes) for run in runs)
        told["bytes"] = sum(len(run.hashes) * run.namespace.record_bytes for run in runs)
        told["loaded_bytes"] = sum(run.loaded * run.namespace.record_bytes for run in runs)
        told["is_over"] = not self._is_asking and not self._records and not told["left"]
        return told

    # -- the chain --

    def _find(self) -> Steps[None]:
        """Of blocks that the index knows; of the other namespaces the bucket is asked, and answers by itself."""
        blocks, others = yield from known_steps(list(self._engine.namespaces), self._selector, self._hash)
        levels = [source.level for source in self._engine.loader.shared if not source.level.is_far]
        if others and levels:
            self._is_asking = True
            digests = [space.digest for space in others]
            levels[0].chains(digests, self._hash, WARM_NAMESPACES_MAX + 1, self._bucket_said)
        for block in blocks[: WARM_NAMESPACES_MAX + 1]:
            above = yield from chain_steps(block)
            if above:
                self._runs.append(_Run(block.namespace, [one.hash for one in above]))
                yield from self._touch(above)

    def _bucket_said(self, chains: Mapping[bytes, Sequence[bytes]]) -> None:
        self._is_asking = False
        for digest, hashes in chains.items():
            namespace = self._engine.namespaces.of_key(digest)
            if namespace is not None:
                self._runs.append(_Run(namespace, hashes))

    def _touch(self, above: Sequence[Block]) -> Steps[None]:
        """What is held counts as used now."""
        blocks = self._engine.blocks
        for start in range(0, len(above), STEP_SLOW_BLOCKS):
            held = [one for one in above[start : start + STEP_SLOW_BLOCKS] if one.where & IN_ANY]
            if held:
                prompt = self._engine.prompts.recall(held[0].namespace.id, 0, len(above))
                blocks.touched(held, prompt, self._clock())
            yield

    # -- blocks --

    def _may_begin(self) -> bool:
        loader = self._engine.loader
        if loader.starved or any(source.urgent for source in (*loader.devices, *loader.shared)):
            return False
        return self._records < WARM_RECORDS_MAX and (self._bytes < WARM_BYTES_MAX or not self._records)

    def _begin(self, run: _Run) -> None:
        hashes, loader, namespace = run.hashes, self._engine.loader, run.namespace
        if self._engine.namespaces.of_key(namespace.digest) is not namespace or namespace.is_ended:
            run.gone += run.left
            run.next = len(hashes)
            return
        block_hash = hashes[run.next]
        block = namespace.blocks.get(block_hash)
        if block is not None and loader.is_ready(block):
            run.held += 1
            run.next += 1
            return
        source = None
        if block is None or not block.where & IN_ANY:
            source = self._shared(namespace, block_hash)
            if source is None:
                run.gone += run.left
                run.next = len(hashes)
                return
        parent = hashes[run.next - 1] if run.next else b""
        run.next += 1
        run.under_way += 1
        self._records += 1
        self._bytes += namespace.record_bytes
        waiter = _Wanted(partial(self._arrived, run))
        if source is not None:
            loader.fetch(namespace, block_hash, parent, source, waiter)
        elif block is not None:
            loader.want(block, waiter)

    def _shared(self, namespace: Namespace, block_hash: bytes) -> SharedSource | None:
        return next(
            (
                source
                for source in self._engine.loader.shared
                if source.loads.closed and source.level.held(namespace, block_hash, 0)
            ),
            None,
        )

    def _arrived(self, run: _Run, wanted: _Wanted, block: Block | None) -> None:
        run.under_way -= 1
        self._records -= 1
        self._bytes -= run.namespace.record_bytes
        if block is not None:
            run.loaded += 1
            if block.where & IN_DRAM:
                prompt = self._engine.prompts.recall(run.namespace.id, 0, 1)
                self._engine.blocks.touched([block], prompt, self._clock())
        elif wanted.refused:
            run.refused += 1 + run.left  # what is behind it would find none either
            run.next += run.left
        else:
            run.failed += 1
