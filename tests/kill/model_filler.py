"""Run as a process and killed: brings a model into DRAM, or has one mapped and looks at it for ever.

python -m tests.kill.model_filler fill SOCKET SEED      says "filling", then "filled"
python -m tests.kill.model_filler use SOCKET SEED       says "using", then only what is wrong
"""

from __future__ import annotations

import asyncio
import sys
import time

from coldstart.loading.resident import Image, fill, layout_of
from kvstore.client import models
from tests.coldstart.images import Memory, files_of, manifest_of

MODEL_BYTES = 3_000_000  # of a tensor, at most


def name_of(seed: int) -> str:
    return f"random-{seed}"


def files(seed: int) -> dict[str, bytes]:
    return files_of(seed, 3, MODEL_BYTES)


def bring(socket_path: str, seed: int, pause_s: float = 0.0) -> int:
    """Bytes that were read for it."""
    content = files(seed)
    manifest = manifest_of(content, name_of(seed))
    source = Memory(content)
    with models.fill(
        name_of(seed), "r1", manifest.content[:16], layout_of(manifest).size_bytes, socket_path
    ) as filling:
        if filling.is_whole:
            return 0
        by_source = asyncio.run(
            fill(filling, manifest, [source], lambda size_bytes: time.sleep(pause_s), room_s=20)
        )
    return sum(by_source.values())


def wrong_of(socket_path: str, seed: int) -> str:
    """What is not true of a whole one, in words."""
    content = files(seed)
    with models.attach(name_of(seed), "r1", socket_path, wait_s=20) as model:
        image = Image(model.view)
        wrong = [path for path in content if image.file(path) != content[path]]
        del image
    return " ".join(wrong)


def use(socket_path: str, seed: int) -> None:
    content, model = files(seed), models.attach(name_of(seed), "r1", socket_path, wait_s=20)
    image = Image(model.view)
    print("using", flush=True)
    while True:
        for path in content:
            if image.file(path) != content[path]:
                print(f"wrong: {path}", flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    _, what, socket, number = sys.argv
    if what == "use":
        use(socket, int(number))
    print("filling", flush=True)
    bring(socket, int(number), pause_s=0.005)
    print("filled", flush=True)
