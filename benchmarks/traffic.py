"""Made-up traffic with a seed: what a policy must be good at, besides recorded traces.

    sessions (generators) ──▶ World: a heap by time ──▶ requests: (timestamp, tokens, chained block hashes)

Every shape draws its own parameters from its seed (lengths, pauses, how often users
come back), so that two seeds are two services and not two samples of one:

* chat    conversations behind a few system prompts; people pause between turns
* agents  long shared prefixes, many quick steps, some of them forks
* tasks   several kinds of agents whose prompts grow for dozens of steps, then never come back
* study   conversations about long documents, of which some are popular
* rag     a few retrieved documents one behind another in each prompt, in any order
* scan    chat, and batches of documents that are read once, or again and again in a circle
* shift   chat that suddenly becomes agents, then another chat
* mix     chat, agents and popular prompts at once
* bursts  chat whose people arrive in waves
* popular prompts of every length asked again and again, some more often, nobody in conversation
* drift   the same, and what is popular changes
* loop    documents in a circle larger than most caches, and some chat
* giant   one prompt of hundreds of blocks that all requests begin with

and of each of chat, agents, mix and shift one with another clock: `still` (all at once),
`coarse` (logged by the half-minute), `fast` and `slow` (100 times).

Requests have the form of the Mooncake traces: blocks of 512 tokens, the last one partly
filled and therefore with a hash of its own that hardly ever comes back.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_TOKENS = 512
Session = Iterator[float]  # yields how long it pauses, in seconds


class Request(NamedTuple):
    """One line of a trace. A hash is a number that stands for a block and all before it."""

    timestamp_ms: int
    tokens: int
    hashes: list[int]


@dataclass(slots=True)
class Chain:
    """A prompt that grows: its full blocks, and how many tokens it has."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0

    def fork(self) -> Chain:
        """Another prompt that begins with the full blocks of this one."""
        return Chain(list(self.blocks), len(self.blocks) * BLOCK_TOKENS)


class World:
    """The clock, the numbers of blocks, and who asks next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._sessions: list[tuple[float, int, Session]] = []
        self._requests: list[Request] = []

    def extend(self, chain: Chain, tokens: float) -> None:
        chain.tokens += max(1, int(tokens))
        while len(chain.blocks) < chain.tokens // BLOCK_TOKENS:
            chain.blocks.append(next(self._numbers))

    def ask(self, chain: Chain) -> None:
        """A request for this prompt, now."""
        hashes = list(chain.blocks)
        if chain.tokens % BLOCK_TOKENS:
            hashes.append(next(self._numbers))
        self._requests.append(Request(int(self.now_s * 1000), chain.tokens, hashes))

    def spawn(self, session: Session, pause_s: float = 0.0) -> None:
        heapq.heappush(self._sessions, (self.now_s + pause_s, next(self._order), session))

    def stop(self) -> None:
        """All users leave: what follows is other traffic."""
        self._sessions.clear()

    def run(self, blocks_max: int) -> Iterator[Request]:
        """Requests in order of time, until they name that many blocks."""
        blocks = 0
        while self._sessions and blocks < blocks_max:
            self.now_s, _, session = heapq.heappop(self._sessions)
            pause_s = next(session, None)
            if pause_s is not None:
                self.spawn(session, pause_s)
            for request in self._requests:
                blocks += len(request.hashes)
                yield request
            self._requests.clear()

    def lognormal(self, median: float, spread: float) -> float:
        return median * math.exp(self.random.gauss(0.0, spread))

    def arrivals(self, rate: float, start: Callable[[], Session]) -> Session:
        """New sessions at a Poisson rate, for ever."""
        while True:
            yield self.random.expovariate(rate)
            self.spawn(start())

    def prefixes(self, count: int, tokens: float, spread: float) -> list[Chain]:
        """Prompts that many requests share."""
        chains = []
        for _ in range(count):
            chain = Chain()
            self.extend(chain, self.lognormal(tokens, spread))
            chains.append(chain)
        return chains

    def zipf(self, chains: list[Chain], slope: float) -> Chain:
        weights = [1 / (rank + 1) ** slope for rank in range(len(chains))]
        return self.random.choices(chains, weights)[0].fork()


def chat(world: World) -> None:
    """Conversations: the longer one lasts, the likelier it goes on; long prompts tire people."""
    rng = world.random
    systems = world.prefixes(rng.randint(1, 30), rng.uniform(300, 3000), 0.8)
    slope, prompt = rng.uniform(0.6, 1.4), rng.uniform(800, 6000)
    stay, stay_late = rng.uniform(0.25, 0.5), rng.uniform(0.6, 0.9)
    pause, turn = rng.uniform(20, 120), rng.uniform(300, 1500)

    def conversation() -> Session:
        chain = world.zipf(systems, slope)
        world.extend(chain, world.lognormal(prompt, 1.0))
        number = 1
        while True:
            world.ask(chain)
            chance = stay_late - (stay_late - stay) * math.exp(-(number - 1) / 3)
            if rng.random() > chance / (1 + chain.tokens / 60_000):
                return
            yield 5 + world.lognormal(pause, 0.9)
            world.extend(chain, world.lognormal(turn, 0.7) + world.lognormal(turn / 4, 1.0))
            number += 1

    world.spawn(world.arrivals(rng.uniform(1.0, 3.0), conversation))


def agents(world: World) -> None:
    """Tasks of many quick steps behind long prompts; a step may fork, and a fork's end is forgotten."""
    rng = world.random
    tools = world.prefixes(rng.randint(3, 12), rng.uniform(6000, 25_000), 0.5)
    slope, steps = rng.uniform(0.5, 1.2), rng.uniform(4, 25)
    pause, growth, forks = rng.uniform(2, 15), rng.uniform(300, 2000), rng.uniform(0, 0.1)

    def work(chain: Chain, length: int, depth: int) -> Session:
        for _ in range(length):
            world.extend(chain, world.lognormal(growth, 0.9))
            world.ask(chain)
            if depth < 2 and rng.random() < forks:
                world.spawn(work(chain.fork(), max(1, length // 3), depth + 1))
            yield world.lognormal(pause, 1.0)

    def task() -> Session:
        return work(world.zipf(tools, slope), 1 + int(rng.expovariate(1 / steps)), 0)

    world.spawn(world.arrivals(rng.uniform(0.1, 0.4), task))


def tasks(world: World) -> None:
    """Agents of several kinds: each has its pace, its tools, and how long it works at something."""
    rng = world.random

    def agent() -> Session:
        tools = world.prefixes(rng.randint(1, 6), rng.uniform(2000, 15_000), 0.5)
        steps, pause = rng.uniform(15, 80), rng.uniform(2, 20)
        growth, rate = rng.uniform(300, 1500), rng.uniform(0.02, 0.1)

        def task() -> Session:
            chain = world.zipf(tools, 1.0)
            world.extend(chain, world.lognormal(2000, 0.8))
            for _ in range(1 + int(rng.expovariate(1 / steps))):
                world.ask(chain)
                yield world.lognormal(pause, 1.0)
                world.extend(chain, world.lognormal(growth, 0.9))

        return world.arrivals(rate, task)

    for _ in range(rng.randint(1, 4)):
        world.spawn(agent())


def study(world: World) -> None:
    """Questions about long documents, one after another; some bring a document of their own."""
    rng = world.random
    documents = world.prefixes(rng.randint(100, 800), rng.uniform(5000, 30_000), 0.8)
    slope, stay = rng.uniform(0.3, 1.0), rng.uniform(0.5, 0.85)
    pause, once = rng.uniform(10, 120), rng.uniform(0, 0.4)

    def conversation() -> Session:
        chain = world.zipf(documents, slope) if rng.random() > once else Chain()
        world.extend(chain, world.lognormal(500, 1.0))
        world.ask(chain)
        while rng.random() < stay:
            yield world.lognormal(pause, 1.0)
            world.extend(chain, world.lognormal(600, 0.8))
            world.ask(chain)

    world.spawn(world.arrivals(rng.uniform(0.3, 2.0), conversation))


def rag(world: World) -> None:
    """One to three documents behind a system prompt, then a question that nobody asked before."""
    rng = world.random
    systems = world.prefixes(rng.randint(1, 5), rng.uniform(500, 2000), 0.5)
    count, slope = rng.randint(100, 3000), rng.uniform(0.5, 1.1)
    weights = list(itertools.accumulate(1 / (rank + 1) ** slope for rank in range(count)))
    sizes = [world.lognormal(2500, 0.7) for _ in range(count)]
    known: dict[tuple[int, ...], Chain] = {}

    def people() -> Session:
        while True:
            number = rng.randrange(len(systems))
            chain = systems[number].fork()
            read: tuple[int, ...] = (number,)
            for document in rng.choices(range(count), cum_weights=weights, k=rng.choice((1, 1, 1, 2, 3))):
                read += (document,)
                if read not in known:
                    world.extend(chain, sizes[document])
                    known[read] = chain.fork()
                chain = known[read].fork()
            world.extend(chain, world.lognormal(200, 0.5))
            world.ask(chain)
            yield rng.expovariate(2.0)

    world.spawn(people())


def scan(world: World) -> None:
    """Chat, and a batch job that reads documents: once each, and some of them in a circle."""
    chat(world)
    rng = world.random
    head = world.prefixes(1, 800, 0.3)[0]
    circle = world.prefixes(rng.randint(20, 200), 8000, 0.6)
    every, size, once = rng.uniform(60, 300), rng.randint(20, 80), rng.random()

    def batch() -> Session:
        at = 0
        while True:
            yield every
            for _ in range(size):
                if rng.random() < once:
                    chain = head.fork()
                    world.extend(chain, world.lognormal(12_000, 0.6))
                else:
                    chain, at = circle[at], (at + 1) % len(circle)
                world.ask(chain)
                yield 0.5

    world.spawn(batch())


def popular(world: World) -> None:
    """Prompts drawn by popularity and by nothing else."""
    _popular(world, drift_every=0)


def drift(world: World) -> None:
    """The same, and every now and then another prompt becomes the favourite."""
    _popular(world, drift_every=world.random.randint(20, 200))


def _popular(world: World, drift_every: int) -> None:
    rng = world.random
    prompts = world.prefixes(rng.randint(200, 3000), rng.uniform(1500, 12_000), 0.9)
    slope, once = rng.uniform(0.6, 1.2), rng.choice((0.0, rng.uniform(0.0, 0.5)))
    weights = list(itertools.accumulate(1 / (rank + 1) ** slope for rank in range(len(prompts))))

    def people() -> Session:
        for number in itertools.count(1):
            chain = rng.choices(prompts, cum_weights=weights)[0].fork()
            if rng.random() < once:
                chain = Chain()
                world.extend(chain, world.lognormal(6000, 0.9))
            world.ask(chain)
            yield rng.expovariate(2.0)
            if drift_every and number % drift_every == 0:
                prompts.insert(0, prompts.pop(rng.randrange(len(prompts))))

    world.spawn(people())


def mix(world: World) -> None:
    """Three kinds of users at once."""
    chat(world)
    agents(world)
    popular(world)


def bursts(world: World) -> None:
    """Chat in waves: many users come at once, and then hardly any."""
    rng = world.random
    systems = world.prefixes(rng.randint(1, 20), rng.uniform(300, 6000), 0.8)
    calm, busy = rng.uniform(0.1, 0.5), rng.uniform(5.0, 15.0)
    wave_s, stay, pause = rng.uniform(20, 200), rng.uniform(0.4, 0.8), rng.uniform(10, 90)

    def conversation() -> Session:
        chain = world.zipf(systems, 1.0)
        world.extend(chain, world.lognormal(4000, 1.0))
        world.ask(chain)
        while rng.random() < stay:
            yield world.lognormal(pause, 0.9)
            world.extend(chain, world.lognormal(900, 0.8))
            world.ask(chain)

    def waves() -> Session:
        while True:
            for rate in (busy, calm):
                end_s = world.now_s + rng.expovariate(1 / wave_s)
                while world.now_s < end_s:
                    yield rng.expovariate(rate)
                    world.spawn(conversation())

    world.spawn(waves())


def loop(world: World) -> None:
    """Documents in a circle: the one used longest ago comes next."""
    rng = world.random
    if rng.random() < 0.7:
        chat(world)
    circle = world.prefixes(rng.randint(50, 800), rng.uniform(4000, 20_000), 0.4)
    pause = rng.uniform(0.3, 2.0)

    def reader() -> Session:
        for chain in itertools.cycle(circle):
            world.ask(chain)
            yield pause

    world.spawn(reader())


def giant(world: World) -> None:
    """All requests begin with the same huge prompt."""
    rng = world.random
    head = world.prefixes(1, rng.uniform(50_000, 300_000), 0.1)[0]
    second, stay = rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)

    def conversation() -> Session:
        chain = head.fork() if rng.random() < second else Chain()
        world.extend(chain, world.lognormal(3000, 1.0))
        world.ask(chain)
        while rng.random() < stay:
            yield world.lognormal(60, 1.0)
            world.extend(chain, world.lognormal(1000, 0.8))
            world.ask(chain)

    world.spawn(world.arrivals(rng.uniform(0.2, 2.0), conversation))


def steady(shape: Callable[[World], None]) -> Callable[[int, int], Iterator[Request]]:
    """Traffic of one shape."""

    def requests(seed: int, blocks: int) -> Iterator[Request]:
        world = World(seed)
        shape(world)
        return world.run(blocks)

    return requests


def shift(seed: int, blocks: int) -> Iterator[Request]:
    """Three services after each other, without a word."""
    world = World(seed)
    for shape in (chat, agents, chat):
        world.stop()
        shape(world)
        yield from world.run(blocks // 3)


Shape = Callable[[int, int], Iterator[Request]]


def clocked(clock: Callable[[int], int]) -> Shape:
    """Other traffic, another one for each seed, whose timestamps a clock has spoiled."""

    def requests(seed: int, blocks: int) -> Iterator[Request]:
        shape = (steady(chat), steady(agents), steady(mix), shift)[seed % 4]
        for request in shape(seed, blocks):
            yield request._replace(timestamp_ms=clock(request.timestamp_ms))

    return requests


SHAPES: dict[str, Shape] = {
    "chat": steady(chat),
    "agents": steady(agents),
    "tasks": steady(tasks),
    "study": steady(study),
    "rag": steady(rag),
    "scan": steady(scan),
    "shift": shift,
    "mix": steady(mix),
    "bursts": steady(bursts),
    "popular": steady(popular),
    "drift": steady(drift),
    "loop": steady(loop),
    "giant": steady(giant),
    "still": clocked(lambda at_ms: 0),
    "coarse": clocked(lambda at_ms: at_ms // 30_000 * 30_000),
    "fast": clocked(lambda at_ms: at_ms // 100),
    "slow": clocked(lambda at_ms: at_ms * 100),
}


def as_line(request: Request) -> str:
    """A line of a Mooncake trace."""
    return json.dumps(
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.tokens,
            "output_length": 0,
            "hash_ids": request.hashes,
        }
    )


def main() -> None:
    """Write a trace to stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=200_000, help="stop after this many block references")
    args = parser.parse_args()
    sys.stdout.writelines(as_line(request) + "\n" for request in SHAPES[args.shape](args.seed, args.blocks))


if __name__ == "__main__":
    main()
