"""The policy interface: who leaves a tier when room is needed, and who need not come.

    request ──▶ Policies.observe          once, whatever the tiers
            └─▶ Policy.touched            in each tier that has the blocks now
    no room ──▶ Policy.admits ──▶ Policy.victims, together ──▶ Policy.left
                                                           └─▶ Policies.forgotten   no tier has it any more

`Policies` makes one `Policy` for each size class of each tier and sees every
request once, so that what it learns is learned once. A policy sees blocks (their parents,
pins, sizes through the namespace, last use, tiers) and prompts, and never bytes. It hears
what happened and answers with victims, best first. `kvstore replay` and the daemon run the
same objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.index.stretch import Stretch
from kvstore.steps import Steps, finish


class Policy(ABC):
    """Orders the blocks of one size class in one tier. Called from the engine's thread only."""

    def touched(self, run: Sequence[Block]) -> None:  # noqa: B027 an order by last use needs no more than may_leave
        """A request used these blocks of this tier, in prompt order, or has just brought them.

        Their `touched_s` is the time of it. Changes only the policy.
        """

    def may_leave(self, block: Block) -> None:  # noqa: B027 a policy may keep all blocks in its order, pinned or not
        """The block is resident here, has neither pins nor a child here: it could be a victim now.

        Called when it arrives, when its last pin or last child in this tier is gone. Calling
        it twice is harmless.
        """

    def left(self, run: Sequence[Block]) -> None:  # noqa: B027 a policy may notice when one surfaces in its order
        """The tier lost these blocks: evicted, corrupt, or taken over with their slab."""

    def admits(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> bool:
        """Whether a new block is worth more than what would leave for it. Changes nothing."""
        return True

    def is_choosy(self) -> bool:
        """Whether `admits` may say no now: then it is to be asked for each new block."""
        return False

    @abstractmethod
    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        """Blocks to evict, best first: resident, without pins. `incoming`: the key that wants the room.

        The iterator is valid until a block leaves. A block that the caller passes over comes
        back to the policy with `may_leave`.
        """

    def together(self, victim: Block, count: int) -> Sequence[Block]:
        """The victim, and as many as would be the next ones for any new block: at most `count` together, each
        the parent of the one before. Changes nothing."""
        return (victim,)

    def coldest_s(self) -> float | None:
        """When the next victim was last used, None if there is none or that is not known: it is asked where size classes
        compete for room, which they do not in a replay."""
        return None


class Policies:
    """Policies made by one function, which learn nothing across tiers."""

    def __init__(
        self, make: Callable[[int], Policy], later: Callable[[Steps[None]], object] = finish
    ) -> None:
        """later: takes work that no request waits for."""
        self.make = make
        self.later = later
        self._clock = 0

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        """A request used these blocks or has just brought them: gives them the stretch of this use."""
        self._clock += 1
        stretch = Stretch(self._clock, touched_s=now_s)
        for block in run:
            block.stretch = stretch

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        """A request brought these blocks, and they found no room or were not let in."""

    def worth(self, block: Block) -> float:
        """Hits to be expected of a block, were it kept for long: what a write to NVMe buys. Up to about 1."""
        return 1.0

    def forgotten(self, run: Sequence[Block], names: Sequence[int]) -> None:
        """No tier has these blocks of one namespace any more. `names`: what `Namespace.names_of` calls them."""
