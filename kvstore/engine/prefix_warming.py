"""Bringing one prefix into DRAM because an operator named it, ahead of any request.

    hash ─▶ its chain, from the first block on ─▶ batch by batch (`Bringing`)
              │ the index knows the chain of what a tier holds, the bucket of its own

The command asks again and again until all is there. Each question begins the next batch, so a command that is interrupted
stops the warming. Unlike an order for a region it may displace what is used less. What comes counts as used now, or the end
of a long prefix would displace its own beginning.

Called from the engine's thread only; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.constants import STEP_BLOCKS, STEP_SLOW_BLOCKS, WARM_NAMESPACES_MAX
from kvstore.durable.bringing import Bringing
from kvstore.engine.parts import Parts
from kvstore.errors import BadRequest, NotFound, NotReady
from kvstore.index.block import Block, Namespace
from kvstore.steps import Steps


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
        self._runs: list[Bringing] = []
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
            yield from run.go_on()
            if run.under_way or run.left:
                break  # its turn goes on
            yield from self._look_back(run)
        return self._report()

    def _look_back(self, run: Bringing) -> Steps[None]:
        """Where DRAM cannot hold all of it, what came last made some of it leave."""
        there = 0
        for start in range(0, len(run.hashes), STEP_BLOCKS):
            known = run.namespace.blocks.get_run(run.hashes[start : start + STEP_BLOCKS])
            there += sum(block is not None and run.has_come(block) for block in known)
            yield
        if there < run.held + run.loaded:
            run.why, run.loaded = run.why or "refused", max(0, there - run.held)

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
                self._add(block.namespace, [one.hash for one in above])

    def _bucket_answered(self, chains: Mapping[bytes, Sequence[bytes]]) -> None:
        self._is_asking = False
        for digest, hashes in chains.items():
            namespace = self._engine.namespaces.of_key(digest)
            if namespace is not None:
                self._add(namespace, hashes)

    def _add(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        self._runs.append(Bringing(self._engine.loader, namespace, hashes, used=self._used))

    def _used(self, block: Block) -> None:
        prompt = self._engine.prompts.recall(block.namespace.id, 0, 1)
        self._engine.blocks.touched([block], prompt, self._clock())
