"""What a mirror remembers is bounded by what it has to do, however long one of its copies fails."""

from __future__ import annotations

import random

from replication.formats.rules import Rule
from replication.mirror.jobs import DONE_KEPT_MAX, Job, Jobs
from replication.mirror.watermark import Hold, Watermark

WRITERS = ("a" * 16, "b" * 16)


def test_jobs_that_are_done_are_forgotten_though_an_older_one_fails_for_ever() -> None:
    """The oldest one stays known, and what was done behind it takes no memory."""
    jobs = Jobs({})
    bad = Job(b"bad", 1, Rule(), 1.0)
    jobs.add(bad)
    for number in range(4 * DONE_KEPT_MAX):
        job = Job(str(number).encode(), 1, Rule(), 2.0 + number)
        jobs.add(job)
        jobs.heard(job, 1.5 + number)
        jobs.done(job)
    assert jobs.oldest_s() == 1.0 and len(jobs._by_age) <= DONE_KEPT_MAX + 2
    late = Job(b"late", 1, Rule(), 9.0)
    jobs.add(late)
    jobs.done(bad)
    assert jobs.oldest_s() == 9.0
    jobs.done(late)
    assert jobs.oldest_s() is None


def test_a_watermark_remembers_only_what_is_not_let_go() -> None:
    """By a seed: segments of two writers are heard and let go in any order, with leaps and sweeps in between, whose jobs may never end. The
    watermark is where it would be if every segment were remembered, and no more is than waits."""
    for seed in range(200):
        chance = random.Random(seed)
        watermark = Watermark({})
        heard, done = dict.fromkeys(WRITERS, 0), dict.fromkeys(WRITERS, 0)
        since_leap: dict[str, list[Hold]] = {writer: [] for writer in WRITERS}
        waiting: list[Hold] = []
        sweep: Hold | None = None
        must_sweep = True
        for _ in range(200):
            step = chance.random()
            if step < 0.45:
                writer = chance.choice(WRITERS)
                heard[writer] += 1
                hold = watermark.heard(writer, heard[writer])
                waiting.append(hold)
                since_leap[writer].append(hold)
            elif step < 0.9 and waiting:
                watermark.release(waiting.pop(chance.randrange(len(waiting))))
            elif step < 0.92:
                watermark.leap()
                since_leap, must_sweep = {writer: [] for writer in WRITERS}, True
            elif must_sweep:
                sweep, must_sweep = watermark.sweep(dict(heard)), False
                waiting.append(sweep)
            if sweep is not None and not sweep.left:
                done = {writer: max(done[writer], sweep.positions[writer]) for writer in WRITERS}
                sweep = None
            if sweep is None and not must_sweep:
                for writer, holds in since_leap.items():
                    for hold in holds:
                        if hold.left:
                            break
                        done[writer] = max(done[writer], hold.positions[writer])
            assert {writer: watermark.positions.get(writer, 0) for writer in WRITERS} == done, seed
            assert sum(map(len, watermark._open.values())) <= len(waiting), seed
