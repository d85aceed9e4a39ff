"""Run as a process and killed: a daemon that fills an arena, or a client that writes into one.

    python -m tests.tiers.arena_filler fill PATH SEED      reserve, commit and free at random, for ever
    python -m tests.tiers.arena_filler hold PATH OWNER     hold an owner's lock until killed

`fill` says `slot S G` for a record it committed into slot S under generation G.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from tests.tiers.records import CAPACITY_BYTES, SLAB_BYTES, commit, free, record, reserve
from tiers import locks
from tiers.arena import open_arena

SIZES = (3_000, 40_000, 130_000)
CLIENT = 7


def fill(path: Path, seed: str) -> None:
    chance = random.Random(seed)
    arena = open_arena(path, CAPACITY_BYTES, SLAB_BYTES)
    ready = [slot for slot, _ in arena.adopted_slots()]
    print("ready", flush=True)
    for number in range(1 << 30):
        item, data = record(number, SIZES[number // 50 % 3])
        slot = reserve(
            arena, item.key, item.parent, item.size_bytes, chance.choice((0, CLIENT)), item.columns
        )
        if slot is None:
            for victim in chance.sample(ready, len(ready) // 2):
                ready.remove(victim)
                free(arena, victim)
            continue
        generation = arena.generation(slot)
        arena.view(slot)[:] = data
        if chance.random() < 0.1:
            free(arena, slot)
            continue
        commit(arena, slot, item.checksum)
        ready.append(slot)
        print(f"slot {slot} {generation}", flush=number % 8 == 0)


def hold(path: Path, owner: int) -> None:
    fd = os.open(path, os.O_RDWR)
    print("held" if locks.try_lock(fd, owner) else "refused", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(Path(sys.argv[2]), sys.argv[3])
    else:
        hold(Path(sys.argv[2]), int(sys.argv[3]))
