"""Messages in plain Python: structs, documents (docs/cli.md), bytes.

keywords ─▶ filled ─▶ request … answer ─▶ plain ─▶ a struct, the document, or the only field that it has
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvstore.remote.errors import BadRequest, Failed
from kvstore.v1.types_pb2 import NamespaceSelector


class Namespace(msgspec.Struct, frozen=True):
    """Whose blocks. digest: 16 bytes; columns: bytes of each column of a record, none: one column."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int
    fields: Mapping[str, str]
    columns: tuple[int, ...] = ()


class Selector(msgspec.Struct, frozen=True):
    """Which namespaces are meant: those of one engine. digest: in hex, or its beginning; model: the name, or a part of it;
    tenant: "" is one, too, None: whatever tenant."""

    digest: str = ""
    model: str = ""
    tenant: str | None = None


class Run(msgspec.Struct, frozen=True):
    """So many consecutive blocks that share a fate. tier: "dram", "nvme", "bucket"; "": no tier has them."""

    blocks: int
    tier: str
    outcome: str


class Lookup(msgspec.Struct, frozen=True):
    """The longest prefix that is held. hashes: of all blocks of a prompt of tokens, joined."""

    blocks: int
    held_blocks: int
    held_tokens: int
    held_bytes: int
    runs: tuple[Run, ...]
    predicted_load_s: float
    hashes: bytes


class Caller(msgspec.Struct, frozen=True):
    """As whom the node knows us. tenant: the only one that we may know of."""

    name: str
    may: tuple[str, ...]
    tenant: str | None


class OperationState(msgspec.Struct, frozen=True):
    """Work that goes on there. state: running, done, failed, cancelled. begun, ended: unix seconds."""

    id: str
    method: str
    subject: str
    state: str
    begun: float
    ended: float | None
    progress: str
    document_json: str
    problem: str
    exit_code: int

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @property
    def document(self) -> dict[str, Any] | None:
        """What the command of the CLI prints with -o json, where it came so far."""
        return document_of(self.document_json) if self.document_json else None


Space = Namespace | Selector | str  # a text is a digest in hex, or its beginning
STRUCTS: Final[dict[str, type[msgspec.Struct]]] = {
    "LookupResponse": Lookup,
    "Run": Run,
    "Namespace": Namespace,
    "Operation": OperationState,
    "GetPrincipalResponse": Caller,
}


def document_of(text: str) -> dict[str, Any]:
    """Raises Failed."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Failed(f"the answer is no document: {error}", "ANSWER") from error


def plain(message: Any) -> Any:
    """A message as users have it; None where it says nothing."""
    if isinstance(message, (Timestamp, Duration)):
        return message.ToNanoseconds() / 1e9
    fields = message.DESCRIPTOR.fields_by_name
    if struct := STRUCTS.get(message.DESCRIPTOR.name):
        return struct(*(_value(message, fields[name]) for name in struct.__struct_fields__))
    if "document_json" in fields:
        return document_of(message.document_json)
    values = [_value(message, field) for field in fields.values()]
    return values[0] if values else None


def _value(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)  # a later node has words of its own
        return _word(known.name) if known is not None else str(value)
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    if field.is_repeated:
        return tuple(map(plain, value) if field.message_type is not None else value)
    return value


def _word(name: str) -> str:
    """TIER_DRAM: "dram"; TIER_UNSPECIFIED: ""."""
    word = name.rpartition("_")[2].lower()
    return "" if word == "unspecified" else word


def filled(request: Any, values: Mapping[str, Any]) -> Any:
    """The request with these fields; None: not set. Raises BadRequest."""
    for name, value in values.items():
        field = request.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            known = ", ".join(request.DESCRIPTOR.fields_by_name)
            raise BadRequest(f"{request.DESCRIPTOR.name}: no field {name}: known are {known}", "FIELD")
        try:
            if value is not None:
                _fill(request, name, value)
        except (TypeError, ValueError, OverflowError, KeyError) as error:
            raise BadRequest(f"{request.DESCRIPTOR.name}: {name}: {error}", "FIELD") from error
    return request


def _fill(request: Any, name: str, value: Any) -> None:
    place, words = getattr(request, name), request.DESCRIPTOR.fields_by_name[name].enum_type
    if words is not None and isinstance(value, str):
        setattr(request, name, {_word(one.name): one.number for one in words.values}[value])
    elif isinstance(place, Duration):
        place.FromNanoseconds(int(value * 1e9))
    elif isinstance(place, NamespaceSelector):
        place.CopyFrom(selector(value))
    elif isinstance(place, Message):
        filled(
            place, dict(value) if isinstance(value, Mapping) else msgspec.structs.asdict(value)
        ).SetInParent()
    elif isinstance(place, MutableMapping):
        place.update(value)
    elif isinstance(place, bytes):
        setattr(request, name, joined(value))
    elif hasattr(place, "extend"):
        place.extend(value)
    else:
        setattr(request, name, value)


def selector(space: Space) -> NamespaceSelector:
    if isinstance(space, Selector):
        return NamespaceSelector(**msgspec.structs.asdict(space))
    return NamespaceSelector(digest=space if isinstance(space, str) else space.digest.hex())


def joined(hashes: bytes | Sequence[bytes]) -> bytes:
    """Block hashes as they travel."""
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)
