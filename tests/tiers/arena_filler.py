"""Run as a process and killed: a daemon that fills an arena, or a client that writes into one.

    python -m tests.tiers.arena_filler fill PATH SEED      reserve, commit and free at random, for ever; a model comes and goes
    python -m tests.tiers.arena_filler hold PATH OWNER     hold an owner's lock until killed

`fill` says `slot S G` for a record it committed into slot S under generation G.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from tests.tiers.records import CAPACITY_BYTES, SLAB_BYTES, commit, content, free, record, reserve
from tiers import locks
from tiers.checksum import digest
from tiers.dram.arena import Arena, open_arena
from tiers.dram.model_slabs import ModelSlab

SIZES = (3_000, 40_000, 130_000)
CLIENT = 7


def fill(path: Path, seed: str) -> None:
    chance = random.Random(seed)
    arena = open_arena(path, CAPACITY_BYTES, SLAB_BYTES)
    ready = [slot for slot, _ in arena.adopted_slots()]
    lent = [slot for slot, _ in arena.adopted_slabs()]
    print("ready", flush=True)
    for number in range(1 << 30):
        if number % 40 == 0:
            turn_model(arena, lent, ready, number, chance)
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


def turn_model(arena: Arena, lent: list[int], ready: list[int], number: int, chance: random.Random) -> None:
    """What a model has goes, or a slab of one comes, and drives records out of one."""
    if lent:
        arena.free_run([lent.pop()])
        return
    for slab in arena.slabs_by_use()[:1]:
        slots = arena.slots_in(slab)
        arena.drain(slots[0], SLAB_BYTES)
        for slot in slots:
            ready.remove(slot)
            free(arena, slot)
    for slot in arena.lend([ModelSlab(f"m@{number}", b"c" * 16, 0, 1)], chance.choice((0, CLIENT))):
        data = content(number, SLAB_BYTES)
        arena.view(slot)[:] = data
        if chance.random() < 0.2:
            arena.free_run([slot])
        else:
            arena.commit_run([slot], digest(data))
            lent.append(slot)


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
