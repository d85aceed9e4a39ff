"""Announced models: manifests that are in a bucket with all of their chunks, as feeds, snapshots and catalogues say it.

A segment, or a part of a snapshot, with models has one field more than others: who does not know models reads the rest of it,
and passes them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from replication.formats.manifests import Manifest, Sha256, named
from replication.formats.ranges import Origin, Size, UnixS
from replication.formats.sealed import Heard, heard

NAME_CHARS_MAX: Final = 512  # of a manifest's object


class AnnouncedModel(msgspec.Struct, frozen=True, array_like=True):
    """name: of the manifest's object. content: see `Manifest`. size_bytes: of its chunks, each once. origin: the region where it
    was published, "": this one. said_s: see `Announced`."""

    name: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    content: Sha256
    size_bytes: Size
    origin: Origin = ""
    said_s: UnixS = 0.0

    @property
    def name_id(self) -> bytes:
        """Of whatever is under this name: see `Removed`."""
        return xxhash.xxh3_128_digest(b"model\0" + self.name.encode())

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
    """What two announcements say of one name: the content of the later one, and that it was published here if one of this content says so.
    `known` itself where the other says nothing new."""
    older, newer = (known, other) if known.said_s <= other.said_s else (other, known)
    origin = newer.origin and older.origin if older.content == newer.content else newer.origin
    both = msgspec.structs.replace(newer, origin=origin)
    return known if both == known else both


def heard_models(raws: Sequence[msgspec.Raw], where: str) -> Heard[AnnouncedModel]:
    return heard(raws, _understood, where)


def _understood(raw: msgspec.Raw) -> AnnouncedModel:
    model = _MODELS.decode(raw)
    if named(model.name) is None:
        raise ValueError(f"{model.name!r}: no name of a manifest")
    return model


_MODELS = msgspec.msgpack.Decoder(AnnouncedModel)
