"""Run as a process and killed: fills a tier for ever and says on stdout what was acknowledged.

    python -m tests.tiers.filler FACTORY DIRECTORY SEED

A line `+N V` means version V of record N was acknowledged, `-N` that it is about to be deleted.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.tiers.factories import BY_NAME, key, record
from tiers.base import Put

RECORDS = 40
SIZES = (5_000, 70_000, 20_000)


def main() -> None:
    name, directory, seed = sys.argv[1:]
    chance = random.Random(seed)
    tier = BY_NAME[name].open_ready(Path(directory))
    print("ready", flush=True)
    version = 0
    while True:
        number, version = chance.randrange(RECORDS), version + 1
        print(f"-{number}", flush=True)
        if chance.random() < 0.3:
            tier.delete([key(number)])
        elif tier.put([record(number, SIZES[number % 3], version)]) == [Put.STORED]:
            print(f"+{number} {version}", flush=True)


if __name__ == "__main__":
    main()
