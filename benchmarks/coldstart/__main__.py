"""How near models come to what the bucket, the disk and the memory do by themselves, and to what others make of them.

    python -m benchmarks.coldstart [--directory DIR] [--size 1GiB] [--rounds 5] [--only WAY ...] [--peers ENVIRONMENT]
                                   [--endpoint URL --bucket NAME] [-o json]

    a bucket, a model in it and on the disk ▶ each way in a process of its own ▶ the fastest setting of each, tried once
                                            ▶ rounds: every way in turn, the page cache emptied before, memory touched before

Figures are medians, ratios the median of the rounds' own ratios. Limits and peers get the setting that is fastest here, ours its
defaults. A peer that is not installed is left out, with a line that says how to install it. --directory: on the disk that is
measured. --peers: a virtual environment whose Python runs them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.coldstart.bucket import Bucket, opened
from benchmarks.coldstart.child import Child, Facts
from benchmarks.coldstart.model import MODEL, in_dram, made
from benchmarks.command import parser_of, run
from kvstore.tools.bench.figures import Figure, Value
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.bench.rounds import Rounds
from kvstore.tools.cli.output import print_table
from kvstore.units import parse_bytes
from tiers.dram.pages import choose_arena_path


class Way(NamedTuple):
    """settings: environments, of which the fastest is taken. package: what has to be installed."""

    module: str
    settings: Sequence[Mapping[str, str]] = ({},)
    package: str = ""


def _runai(*chunk_mib: int) -> list[dict[str, str]]:
    """Of so many MiB a request, or its default (0)."""
    return [
        {"RUNAI_STREAMER_CONCURRENCY": str(streams)}
        | ({"RUNAI_STREAMER_CHUNK_BYTESIZE": str(size << 20)} if size else {})
        for streams in (4, 8, 16)
        for size in chunk_mib
    ]


WAYS = {
    "s3_raw": Way("ours", [{"CONNECTIONS": str(count)} for count in (4, 8, 16)]),
    "disk_write": Way("ours", [{"THREADS": str(count)} for count in (4, 8)]),
    "preload": Way("ours"),
    "runai_s3": Way("peers", _runai(0, 16), "runai-model-streamer[s3]"),
    "disk_read": Way("ours", [{"THREADS": str(count)} for count in (4, 8)]),
    "load_nvme": Way("ours"),
    "runai": Way("peers", _runai(0), "runai-model-streamer"),
    "safetensors": Way("peers", package="safetensors torch"),
    "fastsafetensors": Way(
        "peers", [{"BUFFER_KIB": "16384", "THREADS": str(count)} for count in (4, 16)], "fastsafetensors"
    ),
    "memcpy": Way("ours"),
    "dram_copy": Way("ours"),
    "vllm_cached": Way("peers", package="vllm"),
    "dram_attach": Way("ours"),
}
# Figures that are times of one way, and those that are ratios of two.
RATES = {
    Figure("s3_raw_gbps", "the bucket by itself: ranged GETs, thrown away"): "s3_raw",
    Figure("disk_raw_write_gbps", "the disk by itself: O_DIRECT, allocated, synced"): "disk_write",
    Figure("preload_gbps", "bucket to directory, verified and synced"): "preload",
    Figure("runai_s3_gbps", "runai-model-streamer from the same bucket"): "runai_s3",
    Figure("disk_raw_gbps", "the disk by itself: O_DIRECT reads"): "disk_read",
    Figure("load_nvme_gbps", "tensors from the directory, verified"): "load_nvme",
    Figure("runai_gbps", "runai-model-streamer from the disk"): "runai",
    Figure("safetensors_gbps", "safetensors.torch.load_file"): "safetensors",
    Figure("fastsafetensors_gbps", "fastsafetensors without a GPU"): "fastsafetensors",
    Figure("memcpy_gbps", "two threads"): "memcpy",
    Figure("load_dram_copy_gbps", "tensors copied out of DRAM, two threads"): "dram_copy",
    Figure("vllm_cached_gbps", "vLLM's default iterator from the page cache, copied"): "vllm_cached",
}
RATIOS = {
    Figure("preload_ratio", "preload / the slower of bucket and disk", 0.9): ("preload", "slower"),
    Figure("preload_to_runai", "preload / runai from the same bucket", 1.6): ("preload", "runai_s3"),
    Figure("load_nvme_ratio", "load_nvme / disk_raw", 0.93): ("load_nvme", "disk_read"),
    Figure("load_nvme_to_runai", "load_nvme / runai"): ("load_nvme", "runai"),
    Figure("load_nvme_to_safetensors", "load_nvme / safetensors"): ("load_nvme", "safetensors"),
    Figure("load_nvme_to_fastsafetensors", "load_nvme / fastsafetensors"): ("load_nvme", "fastsafetensors"),
    Figure("load_dram_copy_ratio", "load_dram_copy / memcpy", 0.85): ("dram_copy", "memcpy"),
    Figure("load_dram_copy_to_vllm", "load_dram_copy / vLLM from the page cache"): (
        "dram_copy",
        "vllm_cached",
    ),
}
ATTACH = Figure(
    "load_dram_attach_ms", "mapped, and a view of every tensor, by a process that is new", 10, "lower"
)
FIGURES = [*RATES, ATTACH, *RATIOS]


def main(words: Sequence[str] | None = None) -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("coldstart", __doc__)
    parser.add_argument("--directory", type=Path, help="for everything that is written")
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--peers", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--endpoint", default="", help="of a server whose bucket is there")
    parser.add_argument("--bucket", default="kvstore")
    return run(parser, with_bucket, show, words)


def with_bucket(args: argparse.Namespace, scratch: Path) -> dict[str, Value]:
    """The document. Raises BenchError, DaemonError."""
    with opened(args.endpoint, args.bucket, scratch) as bucket:
        return measure(args, bucket, scratch)


def show(document: dict[str, Any]) -> None:
    rows = [_row(figure, document[figure.name]) for figure in FIGURES if figure.name in document]
    print_table("figures", ["figure", "value", "aim", "", "what it is"], rows)
    names = {figure.name for figure in FIGURES} | {f"{figure.name}_aim" for figure in FIGURES}
    print_table("conditions", ["field", "value"], [row for row in document.items() if row[0] not in names])


def measure(args: argparse.Namespace, bucket: Bucket, scratch: Path) -> dict[str, Value]:
    """The document. Raises BenchError."""
    others, begun_s = Others(), time.monotonic()
    revision, plain = made(bucket, scratch, args.size, "runai_s3" in args.only)
    size_bytes = sum(path.stat().st_size for path in revision.glob("*.safetensors"))
    told: dict[str, Any] = {
        "bucket": bucket.facts(),
        "scratch": str(scratch),
        "model": MODEL,
        "revision": str(revision),
        "revision_name": revision.name,
        "plain": plain,
        "size_bytes": size_bytes,
        "socket": "",
    }
    with ExitStack() as stack:
        if {"dram_attach", "dram_copy"}.intersection(args.only):
            told["socket"] = str(stack.enter_context(in_dram(scratch, revision, size_bytes)))
        python = str(args.peers / "bin" / "python") if args.peers else sys.executable
        children: dict[str, Child] = {}
        chosen: dict[str, str] = {}
        for name in WAYS:
            if name not in args.only:
                continue
            child, setting = _fastest(name, python, told, bucket.environment())
            if child is not None:
                stack.callback(child.close)
                children[name] = child
                chosen |= {f"{name}_setting": setting} if setting else {}
        rounds, seconds = Rounds(size_bytes), dict[str, list[float]]()
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            for name, child in children.items():
                seconds.setdefault(name, []).append(_one(child, revision))
    if {"s3_raw", "disk_write"} <= seconds.keys():
        seconds["slower"] = list(map(max, seconds["s3_raw"], seconds["disk_write"]))
    for name, took in seconds.items():
        for one in took:
            rounds.add(name, one)
    conditions = facts(scratch, choose_arena_path(None, "auto", size_bytes, "bench").parent)
    conditions["directory"] = str(args.directory or tempfile.gettempdir())
    return _document(rounds, seconds) | {
        "bucket_server": bucket.server,
        "model_bytes": size_bytes,
        "rounds": args.rounds,
        **chosen,
        "other_cpu_percent": others.percent(),
        "run_s": round(time.monotonic() - begun_s, 1),
        **conditions,
    }


def _document(rounds: Rounds, seconds: Mapping[str, list[float]]) -> dict[str, Value]:
    document: dict[str, Value] = {
        figure.name: rounds.gbps(way) for figure, way in RATES.items() if way in seconds
    }
    if "dram_attach" in seconds:
        document[ATTACH.name] = round(1000 * statistics.median(seconds["dram_attach"]), 2)
        document[f"{ATTACH.name}_aim"] = ATTACH.aim
    for figure, (ours, limit) in RATIOS.items():
        if ours in seconds and limit in seconds:
            document[figure.name] = rounds.ratio(ours, limit)
            if figure.aim is not None:
                document[f"{figure.name}_aim"] = figure.aim
    return document


def _fastest(name: str, python: str, told: Facts, bucket: Mapping[str, str]) -> tuple[Child | None, str]:
    """A child with the setting that was fastest, and that setting; none where something is not installed."""
    way, best, best_s, best_words = WAYS[name], None, 0.0, ""
    for setting in way.settings:
        interpreter = python if way.module == "peers" else sys.executable
        child = Child(interpreter, way.module, name, told, {**bucket, **setting})
        if child.missing:
            say(
                f"{name}: left out, {child.missing} is not installed: pip install '{way.package}', or name --peers ENVIRONMENT"
            )
            return None, ""
        took_s = min(_one(child, Path(told["revision"])) for _ in range(min(2, len(way.settings))))
        if best is None or took_s < best_s:
            if best is not None:
                best.close()
            best, best_s = child, took_s
            best_words = " ".join(f"{key}={value}" for key, value in setting.items())
        else:
            child.close()
    say(f"{name}: {told['size_bytes'] / best_s / 1e9:.2f} GB/s {best_words}".rstrip())
    return best, best_words


def _one(child: Child, revision: Path) -> float:
    """Once, with nothing of the model in the page cache."""
    for path in revision.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return child.go()


def _row(figure: Figure, value: Any) -> tuple[str, str, str, str, str]:
    return figure.name, f"{value:g}", figure.aim_text(), figure.verdict(value), figure.meaning


def say(line: str) -> None:
    print(f"coldstart: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
