"""Ranges: what each kind of number and name in an object of a region may be. Parsers refuse the rest, NaN and infinity too.

They are wide: nothing that is true is refused, and whatever passes fits where it is put (a row of the catalogue, a slot of
the arena, a float).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

NAME = r"^[a-z0-9][a-z0-9-]{0,62}\Z"  # of a deployment, a region
WRITER = r"^[0-9a-f]{16}\Z"

UnixS = Annotated[float, Meta(ge=0, lt=1 << 40)]
StoredS = Annotated[int, Meta(ge=0, lt=1 << 32)]  # as the slots of the arena have room for
UntilS = Annotated[int, Meta(ge=0, lt=1 << 40)]  # as the rows of a catalogue have room for
AgeS = Annotated[float, Meta(ge=0, lt=1 << 40)]
Rate = Annotated[float, Meta(ge=0, lt=1 << 60)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]  # bytes
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # of a segment
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]  # of a pack, a namespace; and a checksum
BlockHash = Annotated[bytes, Meta(max_length=64)]  # b"": none
RegionName = Annotated[str, Meta(pattern=NAME)]
WriterName = Annotated[str, Meta(pattern=WRITER)]
Origin = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,62})?\Z")]  # "": this region
HexId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Word = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Positions = Annotated[dict[WriterName, Number], Meta(max_length=1 << 18)]  # by writer
