"""Announced models: manifests that are in a bucket with all of their chunks, as feeds, snapshots and catalogues say it.

A segment, or a part of a snapshot, with models has one field more than others: who does not know models reads the rest of it,
and passes them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from replication.formats.manifests import Manifest, Sha256, named
from replication.formats.ranges import Origin, Size
from tiers.parsing import ParserErrors, parser_failure

NAME_CHARS_MAX: Final = 512  # of a manifest's object


class AnnouncedModel(msgspec.Struct, frozen=True, array_like=True):
    """name: of the manifest's object. content: see `Manifest`. size_bytes: of its chunks, each once. origin: the region where it
    was published, "": this one."""

    name: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    content: Sha256
    size_bytes: Size
    origin: Origin = ""

    @property
    def id(self) -> bytes:
        """Of this content under this name; 16 bytes, as the id of a pack."""
        return xxhash.xxh3_128_digest(self.name.encode() + b"\0" + self.content)

    @property
    def model(self) -> str:
        return self._parts[0]

    @property
    def revision(self) -> str:
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str, str]:
        parts = named(self.name)
        assert parts is not None
        return parts


def announced_model(manifest: Manifest, origin: str = "") -> AnnouncedModel:
    """What is announced of a manifest."""
    size_bytes = sum(chunk.size_bytes for chunk in manifest.chunks)
    return AnnouncedModel(manifest.name, manifest.content, size_bytes, origin)


def merged_models(known: AnnouncedModel, other: AnnouncedModel) -> AnnouncedModel:
    """What two announcements say of one name, the second one later: `known` itself where it says nothing new."""
    if known.content != other.content or (known.origin and not other.origin):
        return other
    return known


class Heard(NamedTuple):
    """unsound: how many others cannot be true; reason: what is wrong with the first of them."""

    models: list[AnnouncedModel]
    unsound: int
    reason: str


def heard_models(raws: Sequence[msgspec.Raw], where: str) -> Heard:
    """All that can be true: one that cannot takes no other one with it."""
    found: list[AnnouncedModel] = []
    unsound, reason = 0, ""
    for raw in raws:
        try:
            model = _MODELS.decode(raw)
            if named(model.name) is None:
                raise ValueError(f"{model.name!r}: no name of a manifest")
            found.append(model)
        except ParserErrors as error:
            unsound += 1
            reason = reason or f"{where}: {parser_failure(error)}"
    return Heard(found, unsound, reason)


_MODELS = msgspec.msgpack.Decoder(AnnouncedModel)
