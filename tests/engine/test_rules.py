"""Rules at their limits: whatever is accepted can be read back and listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.commands import retention_commands
from kvstore.commands.rule_names import one_namespace
from kvstore.constants import TENANT_CHARS_MAX
from kvstore.errors import LimitExceeded, RequestError
from kvstore.index import forest
from kvstore.protocol import frames
from kvstore.protocol.residency_bits import IN_DRAM
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
from tests.engine.test_turns import Counted
from tiers.namespace_spec import NamespaceSpec

LETTERS = {"ascii": "t", "four bytes": "\U0001f600", "escaped": "\x01"}
SINCE_S = 1_700_000_000.123456
SIZE = (1 << 63) - 1
RULES_LINES_MAX = 10_000  # of Python in one turn


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


def test_no_piece_of_the_file_is_encoded_at_once_that_has_all_rules() -> None:
    """While a piece is encoded the event loop waits, whoever encodes it: a rule is a line, and a piece has some hundreds."""
    encoded = list(rules._encoded(most()))
    assert max(piece.count(b"\n") for piece in encoded) <= rules.RULES_STEP
    assert sum(piece.count(b"\n") for piece in encoded) > 3 * RULES_OF_A_KIND_MAX


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


def test_rules_of_many_namespaces_are_many_turns() -> None:
    """A prefix that a thousand namespaces hold is pinned, gets a TTL, and their tenant one; all of it is taken back: no turn grows with
    how many there are, and the file has them all."""
    node, turns, shared = Node(), Counted(), b"shared.."
    node.engine.blocks.guards.limits[IN_DRAM] = 1 << 40
    for number in range(1000):
        spec = NamespaceSpec(number.to_bytes(16, "big"), RECORD_BYTES, 8, 1, {"tenant": "many"})
        space = node.namespaces.get(node.engine.register(spec))
        forest.arrived(space, shared, b"", IN_DRAM)
    retention, background = node.engine.retention, node.engine.blocks.background

    def command(name: str, *arguments: object) -> None:
        answers: list[RequestError | None] = []
        with turns.turn(f"{name} asked"):
            getattr(retention, name)(*arguments, lambda error, rules: answers.append(error))
        while not answers:
            with turns.turn(f"{name} goes on"):
                background.step()
            with turns.turn(f"{name} is written"):
                node.io.run()
        assert answers == [None]

    command("pin", "", shared, True)
    command("ttl", "", shared, None, 60.0, True)
    command("ttl", "", b"", "many", 60.0, True)
    command("quota", "", "many", 1 << 40, None)
    assert RuleFile(node.directory / "retention.json").read() == retention.book
    assert (len(retention.book.pins), len(retention.book.ttls)) == (1000, 1001)
    with turns.turn("namespace"):
        assert one_namespace((999).to_bytes(16, "big").hex(), node.namespaces, retention.book)
    command("ttl", "", b"", "many", None, False)
    command("ttl", "", shared, None, None, False)
    command("pin", "", shared, False)
    command("quota", "", "many", None, None)
    assert retention.book.rules() == []
    assert {work: lines for work, lines in turns.most.items() if lines > RULES_LINES_MAX} == {}
    node.close()
