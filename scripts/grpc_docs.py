"""The reference in docs/grpc.md, made from the comments in proto/: `python -m scripts.grpc_docs` writes it there.

What stands between MARK and the end of the page is made; what stands before it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/grpc.md"
MARK = "<!-- From here on made from proto/ by scripts/grpc_docs.py: change it there. -->\n"
SERVICES = ("cache", "models", "regions", "reports", "nodes", "types")

_RPC = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
_FIELD = re.compile(r"(?:(optional|repeated) )?([\w.]+|map<[\w, ]+>) (\w+) = \d+;")
_VALUE = re.compile(r"([A-Z_0-9]+) = \d+;")
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?")


@dataclass
class Part:
    """A service, an RPC, a message, an enum, a field or a value. words: of an RPC, request and answer; of a field, its type."""

    kind: str
    name: str
    comment: str
    words: tuple[str, ...] = ()
    parts: list[Part] = field(default_factory=list)


def parsed(text: str) -> Part:
    """What a .proto file has, with the comment above each."""
    file = Part("file", "", "")
    stack, comment = [file], list[str]()
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line[2:].strip())
            continue
        above = "\n\n".join(" ".join(block.split("\n")) for block in "\n".join(comment).split("\n\n"))
        comment = []
        if line == "}":
            stack.pop()
        elif found := _BLOCK.fullmatch(line):
            part = Part(found[1], found[2], above)
            stack[-1].parts.append(part)
            if not found[3]:
                stack.append(part)
        elif found := _RPC.fullmatch(line):
            request, answer = (f"{found[at] or ''}{found[at + 1]}" for at in (2, 4))
            stack[-1].parts.append(Part("rpc", found[1], above, (request, answer)))
        elif found := _FIELD.fullmatch(line):
            kind = f"{found[1] or ''} {found[2]}".strip().replace("google.protobuf.", "")
            one_of = f"one of {stack[-1].name}: " if stack[-1].kind == "oneof" else ""
            stack[-1].parts.append(Part("field", found[3], above, (one_of + kind,)))
        elif found := _VALUE.fullmatch(line):
            stack[-1].parts.append(Part("value", found[1], above))
        elif line and not line.startswith(("syntax ", "package ", "import ")):
            raise ValueError(f"{line}: not understood")
    return file


def reference() -> str:
    """The part of the page that is made."""
    files = [
        parsed((ROOT / f"proto/kvstore/v1/{name}.proto").read_text(encoding="utf-8")) for name in SERVICES
    ]
    messages = {part.name: part for file in files for part in file.parts if part.kind in ("message", "enum")}
    lines: list[str] = []
    shown: set[str] = set()
    for service in (part for file in files for part in file.parts if part.kind == "service"):
        lines += [f"## {service.name}", "", service.comment, ""]
        for rpc in service.parts:
            lines += [f"### {service.name}.{rpc.name}", "", rpc.comment, ""]
            for word, what in zip(rpc.words, ("request", "answer"), strict=True):
                stream, name = word.startswith("stream "), word.removeprefix("stream ")
                shown.add(name)
                lines += _of_rpc(messages[name], f"{what}s, a stream" if stream else what)
    lines += ["## Messages that several have", ""]
    for message in (part for name, part in messages.items() if name not in shown):
        lines += [f"### {message.name}", "", *([message.comment, ""] if message.comment else [])]
        lines += _table(message, "value" if message.kind == "enum" else "field")
    return "\n".join(lines).rstrip() + "\n"


def _of_rpc(message: Part, what: str) -> Iterator[str]:
    if message.parts:
        yield from _table(message, what)


def _table(message: Part, what: str) -> Iterator[str]:
    yield from (f"| {what} | type | |", "|---|---|---|")
    for name, kind, comment in _rows(message, ""):
        yield f"| `{name}` | {_cell(kind)} | {_cell(comment)} |"
    yield ""


def _rows(message: Part, before: str) -> Iterator[tuple[str, str, str]]:
    inner = {part.name: part for part in message.parts if part.kind in ("message", "enum")}
    for part in message.parts:
        if part.kind == "oneof":
            yield from _rows(part, before)
        elif part.kind == "value":
            yield before + part.name, "", part.comment
        elif part.kind == "field":
            kind = part.words[0]
            yield before + part.name, kind, part.comment
            nested = inner.get(kind)
            if nested is not None and nested.kind == "message":
                yield from _rows(nested, f"{part.name}.")
    for one in inner.values():
        named = f"{message.name}.{one.name}"
        if one.kind == "enum":
            yield named, "enum", ", ".join(value.name for value in one.parts)
        elif not any(part.words[:1] == (one.name,) for part in message.parts):
            for name, kind, comment in _rows(one, ""):
                yield f"{one.name}.{name}", kind, comment


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def page() -> str:
    """docs/grpc.md as it should be."""
    by_hand, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    return f"{by_hand}{MARK}\n{reference()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
