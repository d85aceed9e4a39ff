"""Run as a process and killed: loads the weights of a model as an engine's rank does, without an engine.

python -m tests.kill.model_loader DIRECTORY RING INDEX COUNT PAUSE_S      says "loading", then the digest of all tensors, and what it read

RING: of several ranks, as `make_shared` names it; "" for one alone.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from coldstart.loading.loading import Loading
from coldstart.loading.ring import SharedRing
from coldstart.loading.start_dir import Revision, open_revision
from coldstart.loading.weight_plan import Plan

RING_BYTES = 16 << 20


def plan_of(revision: Revision) -> Plan:
    paths = sorted(revision.directory.glob("*.safetensors"))
    return Plan([revision.weight_file(path) for path in paths], lambda name: True, RING_BYTES)


def load(directory: Path, ring_path: str, index: int, count: int, pause_s: float) -> tuple[str, int]:
    """Of all tensors, by name, and the bytes that this rank read."""
    revision = open_revision(directory)
    assert revision is not None
    plan = plan_of(revision)
    ring = SharedRing(Path(ring_path), plan.ring_bytes, len(plan.pieces), index, count) if ring_path else None
    while ring is not None and not all(map(ring.is_there, range(count))):
        time.sleep(0.01)  # as ranks of an engine do: who comes later counts as gone
    loading = Loading(plan, revision.chunks(plan, index == 0), ring, 2)
    found = {}
    print("loading", flush=True)
    for name, tensor in loading.tensors():
        found[name] = hashlib.sha256(tensor.numpy()).hexdigest()
        time.sleep(pause_s)
    revision.close()
    return digest_of(found), loading.read_bytes


def digest_of(tensors: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


if __name__ == "__main__":
    _, place, ring_name, number, ranks, pause = sys.argv
    print(*load(Path(place), ring_name, int(number), int(ranks), float(pause)), flush=True)
