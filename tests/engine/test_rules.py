"""Rules at their limits: whatever is accepted can be read back and listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.commands import retention_commands
from kvstore.constants import TENANT_CHARS_MAX
from kvstore.errors import LimitExceeded, RequestError
from kvstore.protocol import frames
from kvstore.retention import rules
from kvstore.retention.rules import (
    RULES_BYTES_MAX,
    RULES_OF_A_KIND_MAX,
    Book,
    Pin,
    Quota,
    Rule,
    RuleFile,
    Ttl,
    rule_bytes,
)
from kvstore.steps import finish
from tests.engine.test_retention import RECORD_BYTES, Node
from tiers.namespace_spec import NamespaceSpec

LETTERS = {"ascii": "t", "four bytes": "\U0001f600", "escaped": "\x01"}
SINCE_S = 1_700_000_000.123456
SIZE = (1 << 63) - 1


def tenant(number: int, letter: str) -> str:
    return f"{number:05d}".ljust(TENANT_CHARS_MAX, letter)


def fullest(letter: str) -> Book:
    """As many TTLs and quotas of tenants with the longest names as are allowed."""
    ttls: list[Ttl] = []
    quotas: list[Quota] = []
    left = RULES_BYTES_MAX
    for number in range(2 * RULES_OF_A_KIND_MAX):
        name = tenant(number, letter)
        rule: Rule = (
            Ttl(1e9 / 7, SINCE_S, tenant=name) if number % 2 else Quota(SIZE, SIZE, SINCE_S, tenant=name)
        )
        left -= rule_bytes(rule)
        if left < 0:
            break
        (ttls if number % 2 else quotas).append(rule)  # type: ignore[arg-type] # as the line above says
    return Book(ttls=tuple(ttls), quotas=tuple(quotas))


def most() -> Book:
    """The most rules of each kind, about prefixes with hashes of 32 bytes."""
    names = [f"{number:032x}" for number in range(RULES_OF_A_KIND_MAX)]
    return Book(
        pins=tuple(Pin(name, "f" * 64, SINCE_S) for name in names),
        ttls=tuple(Ttl(1e9 / 7, SINCE_S, name, "f" * 64) for name in names),
        quotas=tuple(Quota(SIZE, SIZE, SINCE_S, name) for name in names),
    )


def longest_names(node: Node, letter: str) -> None:
    """As many tenants as are told, and many more namespaces, with the longest names there are."""
    for number in range(300):
        fields = {"model": letter * 1024, "tenant": tenant(number, letter)}
        node.engine.register(NamespaceSpec(number.to_bytes(16, "big"), RECORD_BYTES, 32, 1, fields))


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("kind", ["longest names", "most rules"])
def test_the_fullest_book_is_read_back_and_listed(
    kind: str, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest names and the most rules: on disk, back after a restart, and in one answer."""
    node = Node()
    book = fullest(LETTERS[letter]) if kind == "longest names" else most()
    book.require_fitting()
    assert RuleFile(node.directory / "retention.json").write(book) == ""
    node.kill()
    longest_names(node, LETTERS[letter])
    tenants = [(tenant(number, LETTERS[letter]), [SIZE] * 3) for number in range(300)]
    monkeypatch.setattr(node.engine.blocks.quotas, "tenants", lambda count: tenants[:count])
    assert node.engine.retention.book == book
    report = finish(node.engine.retention.report_steps())
    frame = frames.encode_frame(frames.StatusReport(report))
    assert len(frame) <= frames.HEADER_BYTES + frames.FRAME_BYTES_MAX
    told = [report[name] for name in ("pins", "ttls", "quotas")]
    assert [len(rows) for rows in told if isinstance(rows, list)] == [
        len(book.pins),
        len(book.ttls),
        len(book.quotas),
    ]
    assert report["tenants"]
    node.close()


def test_a_rule_that_does_not_fit_is_refused() -> None:
    """One more long name than fits: one clear error, nothing is changed, and short ones can still be removed."""
    node = Node()
    book = fullest("t")
    assert RuleFile(node.directory / "retention.json").write(book) == ""
    node.kill()
    refusal = node.tenant_ttl(60, "n" * TENANT_CHARS_MAX)
    assert isinstance(refusal, LimitExceeded)
    assert f"at most {RULES_BYTES_MAX} are allowed" in str(refusal) and len(str(refusal)) < 200
    assert node.engine.retention.book == book
    assert node.tenant_ttl(60, tenant(1, "t"), is_set=False) is None
    assert node.tenant_ttl(60, "n" * TENANT_CHARS_MAX) is None
    node.kill()
    assert len(node.engine.retention.book.ttls) == len(book.ttls)
    node.close()


def test_what_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A book larger than a file may be is refused by the write itself, and the old file stays."""
    file = RuleFile(tmp_path / "retention.json")
    assert file.write(Book(pins=(Pin("ab", "cd", 1.0),))) == ""
    monkeypatch.setattr(rules, "RULES_FILE_BYTES_MAX", 200)
    assert "at most 200 are allowed" in file.write(Book(pins=tuple(Pin("ab", "cd", n) for n in range(20))))
    assert len(file.read().pins) == 1


@pytest.mark.parametrize(
    "book",
    [
        Book(pins=tuple(Pin("ab", f"{n:08x}", 1.0) for n in range(RULES_OF_A_KIND_MAX + 1))),
        Book(ttls=(Ttl(1.0, 1.0, tenant="t" * (TENANT_CHARS_MAX + 1)),)),
        Book(pins=(Pin("ab" * 17, "cd", 1.0),)),
        Book(quotas=(Quota(-1, None, 1.0, "ab"),)),
        Book(pins=(Pin("ab", "cd" * RULES_BYTES_MAX, 1.0),)),
    ],
)
def test_a_file_beyond_the_limits_is_put_aside(tmp_path: Path, book: Book) -> None:
    """Rules that no command accepts are not taken from a file either: they could not be listed."""
    file = RuleFile(tmp_path / "retention.json")
    assert file.write(book) == ""
    assert file.read() == Book()
    assert (tmp_path / "retention.unreadable").exists()


def test_commands_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one that is being saved two may wait: the next is refused at once."""
    monkeypatch.setattr(retention_commands, "RULE_COMMANDS_MAX", 2)
    node = Node()
    answers: list[RequestError | None] = []

    def ttl(tenant: str) -> None:
        node.engine.retention.ttl("", b"", tenant, 60.0, True, lambda error, _: answers.append(error))

    for name in "abc":
        ttl(name)
    with pytest.raises(LimitExceeded, match="2 commands wait"):
        ttl("d")
    assert node.engine.retention.commands_waiting == 2
    node.io.run()
    assert answers == [None] * 3 and len(node.engine.retention.book.ttls) == 3
    node.close()
