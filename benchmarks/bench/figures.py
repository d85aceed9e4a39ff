"""The figures of `python -m benchmarks`: those of `kvstore bench`, and what developers watch. README.md lists them."""

from __future__ import annotations

from kvstore.tools.bench import figures
from kvstore.tools.bench.figures import Figure

FIGURES: tuple[Figure, ...] = (
    *figures.FIGURES,
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
    Figure("restart_empty_s", "process start to first answer, nothing stored"),
    Figure("restart_1m_blocks_s", "process start to first lookup answered, a million rows", 3, "lower"),
    Figure("restart_1m_indexed_s", "process start until every row is read", 3, "lower"),
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
