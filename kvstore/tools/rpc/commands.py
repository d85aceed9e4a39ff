"""Calls that our own commands do: what is asked for, as words of `kvstore`, and the answer made of what it prints.

request ─▶ words, each a value that is no option ─▶ Operations ─▶ an answer with `operation`: it has begun
                    │ makes no sense                             with `document_json`, or with nothing: it is over
                    ╰▶ BadRequest, and no process
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore.errors import BadRequest
from kvstore.tools.rpc.calls import Call, snake
from kvstore.tools.rpc.operations import Operations
from kvstore.units import exact_duration, printable
from replication.formats.manifests import is_model_name

WORD_CHARS_MAX = 1024
WORDS_MAX = 64  # of one field that is repeated
DAYS_MAX = 3650
JSON = "--output=json"

Words = Callable[[Any], list[str]]  # of a request


class Commands:
    """A servicer of such calls. words: by method."""

    def __init__(
        self, service: ServiceDescriptor, operations: Operations, words: Mapping[str, Words]
    ) -> None:
        self.operations = operations
        for name, of_request in words.items():
            setattr(self, snake(name), partial(self._serve, service.methods_by_name[name], of_request))

    async def _serve(self, method: MethodDescriptor, words: Words, call: Call, request: Any) -> Message:
        return await self.answer(method, call, request, words(request))

    async def answer(self, method: MethodDescriptor, call: Call, request: Any, words: list[str]) -> Message:
        answer, fields = GetMessageClass(method.output_type), method.output_type.fields_by_name
        if "operation" in fields:
            return answer(operation=await self.operations.begin(call, subject_of(request), [*words, JSON]))
        if "document_json" in fields:
            return answer(document_json=await self.operations.ask(call, [*words, JSON]))
        await self.operations.ask(call, words)
        return answer()


def subject_of(request: Any) -> str:
    """What an operation is about."""
    of = getattr(request, "warming", getattr(request, "erasure", request))
    return next(
        (text for name in ("model", "name", "region", "tenant") if (text := getattr(of, name, ""))), ""
    )


def given(option: str, *values: object) -> list[str]:
    """An option for each value that is given, or as a switch where it is true."""
    return [option if value is True else f"{option}={value}" for value in values if value]


def word(name: str, text: str) -> str:
    """A value as an argument. name: of the field. Raises BadRequest."""
    if not text or text.startswith("-") or len(text) > WORD_CHARS_MAX or not text.isprintable():
        allowed = f'1 to {WORD_CHARS_MAX} characters that can be seen, the first of which is not "-"'
        raise BadRequest(f"{name}: {printable(text[:64]) or '(nothing)'}: allowed are {allowed}")
    return text


def words_of(name: str, texts: Iterable[str]) -> list[str]:
    """Those that are given. Raises BadRequest."""
    found = [word(name, text) for text in texts if text]
    if len(found) > WORDS_MAX:
        raise BadRequest(f"{name}: {len(found)} of them: at most {WORDS_MAX} are allowed")
    return found


def span(request: Any, name: str, least_s: float, most_s: float) -> str:
    """A time, "" where it is left out. Raises BadRequest."""
    if not request.HasField(name):
        return ""
    seconds = getattr(request, name).seconds + getattr(request, name).nanos / 1e9
    if not least_s <= seconds <= most_s:
        allowed = f"{exact_duration(least_s)} to {exact_duration(most_s)}"
        raise BadRequest(f"{name}: {seconds:g} s: allowed are {allowed}")
    return f"{seconds:f}s"


def days(number: int) -> list[str]:
    """Raises BadRequest."""
    if number > DAYS_MAX:
        raise BadRequest(f"days: {number}: allowed are 1 to {DAYS_MAX}")
    return given("--days", number)


def model_name(text: str) -> str:
    """NAME or NAME@REVISION. Raises BadRequest."""
    model, at, revision = word("model", text).partition("@")
    if not is_model_name(model) or (at and not is_model_name(revision)):
        allowed = "NAME and NAME@REVISION, each of up to 96 of a-z 0-9 . _ -"
        raise BadRequest(f"model: {printable(text[:100])}: allowed are {allowed}")
    return text
