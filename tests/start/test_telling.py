"""Problems as they are told: the worst and oldest first, and one reason once."""

from __future__ import annotations

from kvstore.daemon.telling import facts_of
from replication.problems import Problem

PLACE = "s3://kv/na: list heads/: the store answers 403 ExpiredToken"


def told(*problems: Problem) -> list[tuple[str, str]]:
    return [(one["kind"], one["subject"]) for one in facts_of(problems, 1e9)]


def test_what_does_not_work_is_first_and_of_it_the_oldest() -> None:
    """A warning comes behind, however old it is."""
    late = Problem("loop", "event loop", "late", level="warning", age_s=9.0)
    assert told(late, Problem("web", "a", "x", age_s=1.0), Problem("grpc", "b", "x", age_s=2.0)) == [
        ("grpc", "b"),
        ("web", "a"),
        ("loop", "event loop"),
    ]


def test_an_object_that_fails_as_its_place_does_is_no_problem_of_its_own() -> None:
    """Its reason is told once, at the region; another reason, or the same one elsewhere, is told."""
    place = Problem("credentials", "na", f"writes only: {PLACE}")
    news = "cannot be written: s3://kv/na: put news: the store answers 403 ExpiredToken"
    assert told(place, Problem("object", "s3://kv/na: news", news)) == [("credentials", "na")]
    assert told(Problem("object", "s3://kv/na: news", news)) == [("object", "s3://kv/na: news")]
    for subject, text in (
        ("s3://kv/na: news", "s3://kv/na: get news: the object is cut off"),
        ("s3://kv/na2: news", news),
    ):
        other = Problem("object", subject, text)
        assert told(place, other) == [("credentials", "na"), ("object", subject)]
