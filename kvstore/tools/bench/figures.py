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
    Figure("disk_write_raw_gbps", "pwritev, O_DIRECT, preallocated file"),
    Figure("nvme_write_gbps", "Device.write of the same records"),
    Figure("nvme_write_ratio", "nvme_write / disk_write_raw", 0.9),
    Figure("disk_read_raw_gbps", "preadv, O_DIRECT, into arena pages"),
    Figure("nvme_read_gbps", "Device.read of the same records, checksums compared"),
    Figure("nvme_read_ratio", "nvme_read / disk_read_raw", 0.9),
    Figure("promote_read_raw_gbps", "preadv in turn with the promotions"),
    Figure("nvme_promote_gbps", "acquire of blocks that only NVMe holds, through the daemon"),
    Figure("nvme_promote_ratio", "nvme_promote / promote_read_raw"),
    Figure("pack_put_gbps", "records packed, hashed and put into the bucket"),
    Figure("pack_put_ratio", "pack_put / obstore alone, objects of the same size", 0.9),
    Figure("pack_get_gbps", "records of packs fetched into place, checksums compared"),
    Figure("pack_get_ratio", "pack_get / obstore alone", 0.9),
)


def flat(values: Mapping[str, Value], figures: Sequence[Figure] = FIGURES) -> dict[str, Value]:
    """The JSON document: figures in their order, each with its aim after it, then the rest."""
    document: dict[str, Value] = {}
    for figure in figures:
        if figure.name in values:
            document[figure.name] = values[figure.name]
            if figure.aim is not None:
                document[f"{figure.name}_aim"] = figure.aim
    return document | {name: value for name, value in values.items() if name not in document}


def rows(values: Mapping[str, Value], figures: Sequence[Figure] = FIGURES) -> list[Sequence[object]]:
    """One line a figure: name, value, aim, verdict, meaning."""
    return [
        (figure.name, f"{value:g}", figure.aim_text(), figure.verdict(value), figure.meaning)
        for figure in figures
        if isinstance(value := values.get(figure.name), int | float)
    ]
