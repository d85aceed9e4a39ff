"""The figures: what each is called, its unit, what it means, and what we aim for.

The names are the fields of `kvstore bench -o json`, a contract: docs/cli.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Value = int | float | str | bool | None


@dataclass(slots=True, frozen=True)
class Figure:
    """aim: None where there is none; `better` says on which side of it the good is."""

    name: str
    meaning: str
    aim: float | None = None
    better: Literal["higher", "lower"] = "higher"

    def verdict(self, value: float) -> str:
        if self.aim is None:
            return ""
        met = value >= self.aim if self.better == "higher" else value <= self.aim
        return "met" if met else "missed"

    def aim_text(self) -> str:
        if self.aim is None:
            return ""
        return f"{'≥' if self.better == 'higher' else '≤'} {self.aim:g}"


FIGURES: tuple[Figure, ...] = (
    Figure("memcpy_gbps", "one thread's memcpy of the same blocks into the same kind of pages"),
    Figure("dram_put_gbps", "reserve, copy and checksum, commit; old blocks are evicted"),
    Figure("dram_get_gbps", "acquire, copy, compare generations, release"),
    Figure("put_ratio", "dram_put / memcpy", 0.85),
    Figure("get_ratio", "dram_get / memcpy", 0.95),
    Figure("small_put_gbps", "put of blocks of 64 KiB"),
    Figure("small_get_gbps", "get of blocks of 64 KiB"),
    Figure("small_put_ratio", "small_put / the same copies and digests, one thread", 0.5),
    Figure("small_get_ratio", "small_get / the same copies, one thread", 0.5),
    Figure("dram_get_view_p50_us", "acquire, view, release of one block, no copy"),
    Figure("view_pings", "the same, over an empty call in turn", 2, "lower"),
    Figure("ping_p50_us", "an empty call: the floor under every other"),
    Figure("lookup_2048_blocks_p50_us", "2048 hashes of 32 bytes, all present", 150, "lower"),
    Figure("lookup_2048_blocks_p99_us", "the slowest of a hundred"),
    Figure("policy_ops_per_s", "blocks decided about, of a million tracked: the policy by itself", 200_000),
    Figure("engine_ops_per_s", "such blocks, the whole way: looked up, stored and evicted", 200_000),
    Figure("dict_ops_per_s", "the same prompts, an OrderedDict as LRU and nothing else"),
    Figure("engine_ratio", "engine_ops / dict_ops"),
    Figure("index_bytes_per_block", "memory for each of a million tracked blocks", 250, "lower"),
    Figure(
        "tp8_tokens_per_s_block16",
        "eight ranks, blocks of 16 tokens: missed, stored, hit, evicted",
        1_000_000,
    ),
    Figure("policy_10m_ops_per_s", "the same with ten millions tracked", 200_000),
    Figure("engine_10m_ops_per_s", "the whole way"),
    Figure("dict_10m_ops_per_s", "an OrderedDict as LRU"),
    Figure("engine_10m_ratio", "engine_10m_ops / dict_10m_ops"),
    Figure("index_10m_bytes_per_block", "memory for each of these", 250, "lower"),
    Figure(
        "loop_hold_1m_ms_max",
        "the slowest turn of the event loop, of all kinds of work that are measured, at a million blocks",
        5,
        "lower",
    ),
    Figure("loop_hold_10m_ms_max", "the slowest turn, at ten million blocks", 5, "lower"),
    Figure("disk_write_raw_gbps", "pwritev, O_DIRECT, preallocated file"),
    Figure("nvme_write_gbps", "Device.write of the same records"),
    Figure("nvme_write_ratio", "nvme_write / disk_write_raw", 0.9),
    Figure("disk_read_raw_gbps", "preadv, O_DIRECT, into arena pages"),
    Figure("nvme_read_gbps", "Device.read of the same records, checksums compared"),
    Figure("nvme_read_ratio", "nvme_read / disk_read_raw", 0.9),
    Figure("promote_read_raw_gbps", "preadv in turn with the promotions"),
    Figure("nvme_promote_gbps", "acquire of blocks that only NVMe holds, through the daemon"),
    Figure("nvme_promote_ratio", "nvme_promote / promote_read_raw"),
    Figure("restart_empty_s", "process start to first answer, nothing stored"),
    Figure("restart_1m_blocks_s", "process start to first lookup answered, a million rows", 3, "lower"),
    Figure("restart_1m_indexed_s", "process start until every row is read", 3, "lower"),
    Figure("pack_put_gbps", "records packed, hashed and put into the bucket"),
    Figure("pack_put_ratio", "pack_put / obstore alone, objects of the same size", 0.9),
    Figure("pack_get_gbps", "records of packs fetched into place, checksums compared"),
    Figure("pack_get_ratio", "pack_get / obstore alone", 0.9),
    Figure(
        "lookup_miss_extra_us",
        "what ten million durable blocks add to the lookup of a prompt nobody stored",
        50,
        "lower",
    ),
    Figure("mirror_gbps", "packs of one region copied into another one by a mirror, from its start on", None),
    Figure("mirror_ratio", "mirror / obstore alone, the slower of put and get", 0.8),
    Figure("catchup_100k_entries_s", "a catalogue that knows nothing reads 100,000 packs of a feed"),
)


def flat(values: Mapping[str, Value]) -> dict[str, Value]:
    """The JSON document: figures in their order, each with its aim after it, then the rest."""
    document: dict[str, Value] = {}
    for figure in FIGURES:
        if figure.name in values:
            document[figure.name] = values[figure.name]
            if figure.aim is not None:
                document[f"{figure.name}_aim"] = figure.aim
    return document | {name: value for name, value in values.items() if name not in document}


def rows(values: Mapping[str, Value]) -> list[Sequence[object]]:
    """One line a figure: name, value, aim, verdict, meaning."""
    return [
        (figure.name, f"{value:g}", figure.aim_text(), figure.verdict(value), figure.meaning)
        for figure in FIGURES
        if isinstance(value := values.get(figure.name), int | float)
    ]
