"""What the demo showed: the JSON document, the tables, and what is wrong.

    gain of a run = (its hit rate − cold) / (everything − cold)

The durable set is worth it when it has most of the gain of everything with a small part of its bytes: GAIN_SHARE_MIN of the
first minute, BYTES_SHARE_MAX of the packs in EU's bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.regions.keepers import TAKEN_OVER_S_MAX
from benchmarks.regions.phases import ORIGIN, TARGET, Run, Shown
from benchmarks.regions.serving import hit_share
from benchmarks.regions.workload import Figures
from kvstore.tools.cli.output import Figure, print_table
from kvstore.units import NOTHING, format_bytes

GAIN_SHARE_MIN, BYTES_SHARE_MAX = 0.80, 0.30
WINDOWS_S = {"60_s": 60.0, "300_s": 300.0, "all": float("inf")}
LATE_S_MAX = 2.0  # of the demo's clock; what is later has another demand than the workload
LAGS = ("lag_p50_s", "lag_p99_s", "lag_max_s")
MIRROR_FIGURES = (
    "state",
    "copied_packs",
    "copied_bytes",
    *LAGS,
    "pending",
    "failed",
    "lost",
)  # of `kvstore region status`


def document(source: str, figures: Figures, speed: float, shown: Shown, wall_s: float) -> dict[str, Any]:
    """Everything that was seen. Shares are between 0 and 1."""
    everything = shown.sizes_bytes["everything", TARGET]
    report: dict[str, Any] = {
        "workload": {"source": source, **figures._asdict()},
        "speed": speed,
        "server": shown.server,
        "runs": _runs(shown.runs),
        "buckets": [
            {
                "deployment": deployment,
                "region": region,
                "pack_bytes": size,
                "share_of_everything": round(size / max(1, everything), 4),
            }
            for (deployment, region), size in shown.sizes_bytes.items()
        ],
        "mirrors": [
            {
                "deployment": deployment,
                "source": pair.source,
                "region": region,
                "rpo_s_max": round(pair.rpo_s_max, 3),
                **{name: pair.status.get(name) for name in MIRROR_FIGURES},
            }
            for (deployment, region), pair in sorted(shown.pairs.items())
        ],
        "keepers": [
            {
                "region": one.region,
                "killed": one.who,
                "killed_s": round(one.killed_s, 1),
                "kept_again_s": None if one.kept_again_s is None else round(one.kept_again_s, 1),
                "by": one.by,
                "looked_s": round(one.looked_s, 1),
            }
            for one in shown.killed
        ],
        "late_s_max": round(shown.late_s, 3),
        "wall_s": round(wall_s, 1),
    }
    problems = list(_problems(report))
    return {**report, "ok": not problems, "problems": problems}


def _runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    shares = {run.name: {name: hit_share(run.served, s) for name, s in WINDOWS_S.items()} for run in runs}
    rows = []
    for run in sorted(runs, key=lambda run: run.name):  # cold, durable, everything
        row: dict[str, Any] = {"run": run.name}
        for window, share in shares[run.name].items():
            row[f"hit_share_{window}"] = round(share, 4)
        for window, share in shares[run.name].items():
            cold, most = shares["cold"][window], shares["everything"][window]
            row[f"gain_share_{window}"] = round((share - cold) / (most - cold), 4) if most > cold else None
        row |= {
            "promised_blocks": sum(one.promised for one in run.served),
            "hit_blocks": sum(one.hits for one in run.served),
            "wrong_blocks": sum(one.wrong for one in run.served),
            "ready_s": round(run.ready_s, 2),
            "serving_s": round(run.serving_s, 1),
        }
        rows.append(row)
    return rows


def _problems(report: dict[str, Any]) -> list[str]:
    problems = []
    durable = next(row for row in report["runs"] if row["run"] == "durable")
    for row in report["runs"]:
        if row["wrong_blocks"]:
            problems.append(f"{row['run']}: {row['wrong_blocks']} blocks had other bytes than were stored")
    gain = durable["gain_share_60_s"]
    if gain is None or gain < GAIN_SHARE_MIN:
        problems.append(
            f"the durable set has {_percent(gain)} of the gain of the first minute; aim: {_percent(GAIN_SHARE_MIN)}"
        )
    share = next(
        row["share_of_everything"]
        for row in report["buckets"]
        if (row["deployment"], row["region"]) == ("durable", TARGET)
    )
    if share > BYTES_SHARE_MAX:
        problems.append(
            f"the durable set has {_percent(share)} of the bytes; aim: {_percent(BYTES_SHARE_MAX)}"
        )
    killed = {row["region"] for row in report["keepers"]}
    problems += [
        f"{region}: its keeper was not killed" for region in (ORIGIN, TARGET) if region not in killed
    ]
    for row in report["keepers"]:
        if (row["kept_again_s"] or row["looked_s"]) > TAKEN_OVER_S_MAX:
            problems.append(
                f"{row['region']}: nobody kept it for {TAKEN_OVER_S_MAX:g} s after its keeper died"
            )
    if report["late_s_max"] > LATE_S_MAX:
        problems.append(
            f"the first half was served up to {report['late_s_max']} s late: this machine is too slow for this speed"
        )
    return problems


def print_report(report: dict[str, Any]) -> None:
    """The tables, on stdout."""
    work = report["workload"]
    print(
        f"{work['requests']} prompts, {work['blocks']} blocks, {work['duration_s'] / 60:.0f} minutes; asked for before: "
        f"{_percent(work['seen_share'])}; seen once: {_percent(work['once_share'])}  ({work['source']})\n"
    )
    print_table(
        "a new cluster in EU serves the second half (gain: share of what everything brings)",
        [
            "set",
            "hits 60 s",
            "5 min",
            "all",
            "gain 60 s",
            "5 min",
            "all",
            "wrong blocks",
            "ready s",
            "serving s",
        ],
        [
            [
                row["run"],
                *(_percent(row[f"hit_share_{window}"]) for window in WINDOWS_S),
                *(_percent(row[f"gain_share_{window}"]) for window in WINDOWS_S),
                row["wrong_blocks"],
                row["ready_s"],
                row["serving_s"],
            ]
            for row in report["runs"]
        ],
    )
    copied = {(row["deployment"], row["region"]): row for row in report["mirrors"]}
    print_table(
        f"buckets, when {ORIGIN.upper()} was switched off, and mirrors until then (seconds of the demo's clock)",
        ["set", "region", "packs", "share", "copied", "lag p50 s", "p99 s", "max s", "RPO max s"],
        [
            [
                row["deployment"],
                row["region"],
                Figure(format_bytes(row["pack_bytes"])),
                _percent(row["share_of_everything"]),
                *_mirror_cells(copied.get((row["deployment"], row["region"]))),
            ]
            for row in report["buckets"]
        ],
    )
    print_table(
        "keepers of the durable set, killed with -9 in the middle of the first half",
        ["region", "keeper", "killed after s", "kept again after s", "by"],
        [
            [
                row["region"],
                row["killed"],
                f"{row['killed_s']:.1f}",
                Figure(NOTHING if row["kept_again_s"] is None else f"{row['kept_again_s']:.1f}"),
                row["by"] or NOTHING,
            ]
            for row in report["keepers"]
        ],
    )
    print(
        f"S3 server: {report['server']}; {report['speed']:g} times real time; {report['wall_s']:.0f} s in all"
    )


def _mirror_cells(mirror: dict[str, Any] | None) -> list[Figure]:
    if mirror is None:
        return [Figure(NOTHING)] * 5
    times = (mirror[name] for name in (*LAGS, "rpo_s_max"))
    return [
        Figure(format_bytes(mirror["copied_bytes"] or 0)),
        *(Figure(NOTHING if time_s is None else f"{time_s:.1f}") for time_s in times),
    ]


def _percent(share: float | None) -> Figure:
    return Figure(NOTHING if share is None else f"{100 * share:.1f} %")
