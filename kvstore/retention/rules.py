"""Rules of retention, and the one small file that keeps them: `retention.json` in the data directory.

    pin      namespace + block hash      that block and all before it are not evicted
    ttl      prefix, namespace or tenant blocks are dropped so many seconds after they were stored
    quota    namespace or tenant         bytes it may hold in each tier

A `Book` is immutable: a command makes a new one, `write` puts it on disk (write to temp,
sync, rename, sync the directory), and only then it takes effect and the command is answered.
So what was acknowledged survives `kill -9`, and a command that could not be saved changed
nothing. A file that cannot be read is put aside, with a warning; the daemon starts without rules.

No book is larger than what can be read back, and reported in one answer: `Book.require_fitting`, before a
book is written and after it was read.

What the rules do is in `kvstore.retention.pins` (pins), `kvstore.retention.expiry` (TTLs), `kvstore.retention.quotas`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvstore.constants import MIB, RULE_BYTES, TENANT_CHARS_MAX, require
from kvstore.errors import LimitExceeded, NotFound
from kvstore.steps import Steps, finish
from tiers.base import NAMESPACE_BYTES
from tiers.files import put_aside, replace_file
from tiers.reading import Unreadable, read_json, require_damaged

RULES_OF_A_KIND_MAX = 4096  # pins, TTLs, quotas
RULES_STEP = 500  # looked at, or encoded, between two yields
RULES_BYTES_MAX = 3 * MIB  # of all rules, so counted: more would not fit into one answer
RULES_FILE_BYTES_MAX = 16 * MIB  # a larger retention.json was not written by us
require(2 * RULES_BYTES_MAX <= RULES_FILE_BYTES_MAX, "what is written can be read back")

log = logging.getLogger("kvstore.retention.rules")

FORMAT: Literal[1] = 1  # bumped when the meaning of a field changes

# What a command would accept: a file with anything else could not be listed.
Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")]
Digest = Annotated[str, Meta(pattern=f"^([0-9a-f]{{2}}){{0,{NAMESPACE_BYTES}}}$")]
Tenant = Annotated[str, Meta(max_length=TENANT_CHARS_MAX)]
Time = Annotated[float, Meta(ge=0, lt=1 << 32)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Shelf = Meta(max_length=RULES_OF_A_KIND_MAX)


class Pin(msgspec.Struct, frozen=True):
    """namespace and block_hash are hex, as everywhere in this file; since_s: unix seconds."""

    namespace: Digest
    block_hash: Hex
    since_s: Time

    @property
    def about(self) -> tuple[str, str]:
        return self.namespace, self.block_hash


class Ttl(msgspec.Struct, frozen=True):
    """For a prefix (namespace and block_hash), a namespace, or a tenant (not None). ttl_s None: for ever."""

    ttl_s: Annotated[float, Meta(gt=0)] | None
    since_s: Time
    namespace: Digest = ""
    block_hash: Hex = ""
    tenant: Tenant | None = None

    @property
    def about(self) -> tuple[str, str, str | None]:
        return self.namespace, self.block_hash, self.tenant


class Quota(msgspec.Struct, frozen=True):
    """For a namespace or a tenant (not None). None: no limit in that tier."""

    dram_bytes: Size | None
    nvme_bytes: Size | None
    since_s: Time
    namespace: Digest = ""
    tenant: Tenant | None = None

    @property
    def about(self) -> tuple[str, str | None]:
        return self.namespace, self.tenant


Rule = Pin | Ttl | Quota
SHELVES: dict[type[Rule], str] = {Pin: "pins", Ttl: "ttls", Quota: "quotas"}
R = TypeVar("R")


class Book(msgspec.Struct, frozen=True):
    """All rules, in the order in which they were given. clock_ahead_s: the clock of TTLs in that boot of the
    machine; see `kvstore.retention.clock`."""

    format: Literal[1] = FORMAT
    pins: Annotated[tuple[Pin, ...], Shelf] = ()
    ttls: Annotated[tuple[Ttl, ...], Shelf] = ()
    quotas: Annotated[tuple[Quota, ...], Shelf] = ()
    boot_id: str = ""
    clock_ahead_s: Time = 0.0

    def rules(self) -> list[Rule]:
        """All of them: pins, TTLs, quotas."""
        return [*self.pins, *self.ttls, *self.quotas]

    def require_fitting(self) -> None:
        """Raises LimitExceeded when all rules together could not be read back, or not be reported."""
        finish(self.fitting_steps())

    def fitting_steps(self) -> Steps[None]:
        """The same in steps."""
        size = 0
        for number, some in enumerate(pieces(self.rules())):
            if number:
                yield
            size += sum(map(rule_bytes, some))
        if size > RULES_BYTES_MAX:
            raise LimitExceeded(
                f"all rules together would take {size} bytes: at most {RULES_BYTES_MAX} are allowed, "
                f"{RULE_BYTES} for each and its names; remove some, or use shorter names of tenants"
            )

    def with_steps(self, rules: Sequence[Rule]) -> Steps[Book]:
        """These rules of one kind instead of those about the same things, if there are any. Raises LimitExceeded."""
        shelf, others = yield from self._others_steps(rules)
        if len(others) + len(rules) > RULES_OF_A_KIND_MAX:
            raise LimitExceeded(
                f"{len(others)} {shelf} are set already: at most {RULES_OF_A_KIND_MAX} are allowed"
            )
        return msgspec.structs.replace(self, **{shelf: (*others, *rules)})

    def without_steps(self, rules: Sequence[Rule]) -> Steps[Book]:
        """No rule about these things any more. rules: of one kind. Raises NotFound."""
        shelf, others = yield from self._others_steps(rules)
        if len(others) + len(rules) > len(getattr(self, shelf)):
            known = {rule.about for rule in getattr(self, shelf)}
            unknown = next(rule for rule in rules if rule.about not in known)
            raise NotFound(f"no {shelf[:-1]} is set for {subject(unknown)}; `kvstore retention` lists all")
        return msgspec.structs.replace(self, **{shelf: tuple(others)})

    def _others_steps(self, rules: Sequence[Rule]) -> Steps[tuple[str, list[Rule]]]:
        """The rules of that kind about other things."""
        shelf = _shelf_of(rules[0])
        about = {rule.about for rule in rules}
        others: list[Rule] = []
        for number, some in enumerate(pieces(getattr(self, shelf))):
            if number:
                yield
            others += [known for known in some if known.about not in about]
        return shelf, others

    def with_clock(self, boot_id: str, ahead_s: float) -> Book:
        """The same rules, kept at another time."""
        return msgspec.structs.replace(self, boot_id=boot_id, clock_ahead_s=ahead_s)


def pieces(things: Sequence[R]) -> Iterator[Sequence[R]]:
    """As many as are looked at between two yields."""
    return (things[at : at + RULES_STEP] for at in range(0, len(things), RULES_STEP))


def rule_bytes(rule: Rule) -> int:
    """The most that a rule takes in the file, or in an answer."""
    return RULE_BYTES + len(getattr(rule, "block_hash", "")) + name_bytes(getattr(rule, "tenant", None))


def name_bytes(name: str | None) -> int:
    """The most that a name takes in a file of JSON, or in an answer."""
    return len(msgspec.json.encode(name)) + 3 if name is not None else 0


def _shelf_of(rule: Rule) -> str:
    return SHELVES[type(rule)]


def subject(rule: Rule) -> str:
    """What a rule is about, in words."""
    if isinstance(rule, (Ttl, Quota)) and rule.tenant is not None:
        return f"tenant {rule.tenant!r}"
    block_hash = getattr(rule, "block_hash", "")
    return (
        f"prefix {block_hash} of namespace {rule.namespace}" if block_hash else f"namespace {rule.namespace}"
    )


class RuleFile:
    """Where the book lies. `path` None keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def read(self) -> Book:
        """The book of an earlier daemon; an empty one if there is none, or it is damaged. Raises OpenError."""
        if self._path is None:
            return Book()
        try:
            book = read_json(self._path, RULES_FILE_BYTES_MAX, Book)
            book.require_fitting()
            return book
        except (Unreadable, LimitExceeded) as error:
            if isinstance(error, Unreadable):
                if error.is_missing:
                    return Book()
                require_damaged(error)
            kept = put_aside(self._path)
            log.warning("pins, TTLs and quotas are lost: %s; the file is kept as %s", error, kept)
            return Book()

    def write(self, book: Book) -> str:
        """Put the book on disk; blocks, so from an I/O thread. "" when it is there, else why not."""
        if self._path is None:
            return ""
        content = b"".join(_encoded(book))
        if len(content) > RULES_FILE_BYTES_MAX:  # it could not be read at the next start
            return f"{self._path}: {len(content)} bytes, at most {RULES_FILE_BYTES_MAX} are allowed"
        try:
            replace_file(self._path, content)
        except OSError as error:
            return f"{self._path}: {error.strerror or error}"
        return ""


def _encoded(book: Book) -> Iterator[bytes]:
    """The book as JSON, a rule a line, in pieces: while one is encoded no other thread has its turn."""
    yield b'{"format":%d,"boot_id":%b,"clock_ahead_s":%b' % (
        book.format,
        msgspec.json.encode(book.boot_id),
        msgspec.json.encode(book.clock_ahead_s),
    )
    for shelf in SHELVES.values():
        yield b',\n"%b":[' % shelf.encode()
        for number, some in enumerate(pieces(getattr(book, shelf))):
            yield (b",\n" if number else b"\n") + b",\n".join(map(msgspec.json.encode, some))
        yield b"]"
    yield b"}\n"
