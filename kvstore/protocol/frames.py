"""The frames of the local door: what travels over the daemon's Unix socket.

    frame    │ u32 LE payload length │ payload: msgpack array, its first element the tag │

    client                                    daemon
      │  Hello(protocol, label, attach) ──────▶ │   each checked the other's uid (SO_PEERCRED)
      │ ◀─ Welcome(…) + fds (SCM_RIGHTS) ────── │   or Error, and the connection closes
      │  request ─▶                             │
      │ ◀─ one answer per request, in order     │   an Error answers one request; the
      │                                         │   connection goes on unless framing broke

Block hashes travel joined, `hash_bytes` each, so that 2048 of them cost one copy and not
2048 objects. KV bytes never travel here: they go through the arena. File
descriptors come with Welcome: one of its slabs, which may be written unless Hello said
read_only, and one of the table file, which may only be read and shows the generations; a
third one for a writer, which it locks while it writes. None is the one that the daemon's lock is on: the lock must not outlive the daemon.

Requests have tags below 64, answers from 64 on. Fields may be added at the end, with a
default; anything else raises PROTOCOL_VERSION.

Light on purpose: the client imports this module inside inference engines.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from tiers.checksum import COLUMNS_MAX
from tiers.dram.model_slabs import CONTENT_BYTES, LABEL_BYTES_MAX, SLABS_MAX

PROTOCOL_VERSION = 5

HEADER = struct.Struct("<I")
HEADER_BYTES = HEADER.size
HELLO_BYTES_MAX = 4096  # payload of a Hello, before we know who is talking

DIGEST_BYTES = 16
CHECKSUM_BYTES = 16
HASH_BYTES_MIN, HASH_BYTES_MAX = 8, 64
HASHES_MAX = 65536  # per lookup, residency or prefetch
# Payload: the largest lookup. A larger claim closes the connection.
FRAME_BYTES_MAX = HASHES_MAX * HASH_BYTES_MAX + (64 << 10)
LEASE_HASHES_MAX = 512  # per reserve or acquire: so many are served in one go
LOOKUP_NAMESPACES_MAX = 64
FIELDS_BYTES_MAX = 16 << 10  # of a namespace, keys and values together
FILLS_MAX = 64
WAIT_MS_MAX = 60_000
LABEL_CHARS_MAX = 200
TRACEPARENT_CHARS = 55  # of W3C Trace Context; what a later version of it has behind them is cut off
SETTING_CHARS_MAX = 8192
MODEL_SLABS_MAX = 1024  # in one answer, or of one commit

assert LEASE_HASHES_MAX <= HASHES_MAX, "what can be leased can be looked up"

_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Lease = Annotated[int, Meta(ge=0)]  # 64 random bits: only its holder knows it
_Bytes = Annotated[int, Meta(ge=1, lt=1 << 32)]
_Tokens = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Text = Annotated[str, Meta(max_length=1024)]


# Requests ---------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag=1):
    """The first frame. attach: whether the arena is wanted (admin tools do without). read_only: a client that
    never writes gets a descriptor that it cannot write through. door: the one that this process is (kvstore grpc): it has an
    audit of its own."""

    protocol: int
    label: Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
    attach: bool = True
    read_only: bool = False
    door: Annotated[str, Meta(max_length=16, pattern="^[a-z]*$")] = ""


class Register(msgspec.Struct, array_like=True, tag=2):
    """Make a namespace known. digest: over all that must be equal for bytes to be reusable. record_bytes:
    size of every record. fields: the identity in words, for people. columns: bytes of each column of a record, in
    order; none: one column. Answer: Registered."""

    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    record_bytes: _Bytes
    hash_bytes: Annotated[int, Meta(ge=HASH_BYTES_MIN, le=HASH_BYTES_MAX)]
    block_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    fields: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    columns: Annotated[list[_Bytes], Meta(max_length=COLUMNS_MAX)] = []


class Lookup(msgspec.Struct, array_like=True, tag=3):
    """How many leading blocks do *all* these namespaces hold? The rest is for the accounts, see
    kvstore.ledger.accounts.Asking. trace: the request's W3C traceparent; what is none is ignored. Answer: Count, with `writing`."""

    namespaces: Annotated[list[_Id], Meta(min_length=1, max_length=LOOKUP_NAMESPACES_MAX)]
    hashes: bytes
    ticket: _Id = 0
    more: bool = False
    tokens: _Tokens = 0
    local_tokens: _Tokens = 0
    prefill_tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    again: bool = (
        False  # of a request that was asked for before with another ticket: preempted, or prefilled elsewhere
    )
    trace: Annotated[str, Meta(max_length=TRACEPARENT_CHARS)] = ""
    lasting: bool = True


class Residency(msgspec.Struct, array_like=True, tag=4):
    """Where is each block? Answer: Places."""

    namespace: _Id
    hashes: bytes


class Reserve(msgspec.Struct, array_like=True, tag=5):
    """Room for the blocks not yet held. parent: the block hash before the first, or b"". ticket: of the lookup
    that named the prompt, or 0. Answer: Reserved."""

    namespace: _Id
    hashes: bytes
    parent: bytes
    ticket: _Id = 0


class Commit(msgspec.Struct, array_like=True, tag=6):
    """Commit these indexes of a lease (16 bytes of checksum each), abort its others. Answer: Count."""

    lease: _Lease
    indexes: Annotated[list[_Id], Meta(max_length=LEASE_HASHES_MAX)]
    checksums: bytes


class Acquire(msgspec.Struct, array_like=True, tag=7):
    """Hold blocks for reading, waiting at most wait_ms for slower tiers. ticket, parent: as in Reserve; shared levels
    find a block within a prompt by its parent. sums: their checksums are wanted. Answer: Acquired."""

    namespace: _Id
    hashes: bytes
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)]
    ticket: _Id = 0
    parent: bytes = b""
    sums: bool = False


class Release(msgspec.Struct, array_like=True, tag=8):
    """Give a read lease back. Answer: Done."""

    lease: _Lease


class Prefetch(msgspec.Struct, array_like=True, tag=9):
    """Start bringing blocks into DRAM; hold nothing. parent: as in Acquire. Answer: Count (blocks on the way)."""

    namespace: _Id
    hashes: bytes
    parent: bytes = b""


class Status(msgspec.Struct, array_like=True, tag=10):
    """Answer: StatusReport of `answers.Status`."""


class Check(msgspec.Struct, array_like=True, tag=11):
    """Check the invariants of the daemon; only for a connection that did not attach. Answer: Problems."""


class Ping(msgspec.Struct, array_like=True, tag=12):
    """Answer: Done."""


class Settle(msgspec.Struct, array_like=True, tag=13):
    """Of what a ticket's lookups found, only so many tokens of the prompt could be used: not the block with
    this hash, or, without one, not what the engine cannot start behind. Answer: Done."""

    ticket: _Id
    tokens: _Tokens
    namespace: _Id
    hash: Annotated[bytes, Meta(max_length=HASH_BYTES_MAX)]


class Explain(msgspec.Struct, array_like=True, tag=14):
    """What would become of each of these blocks, were they looked up now? leading: only those up to the first that would miss,
    it included, without their residency. Answer: Explained."""

    digests: Annotated[
        list[Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]],
        Meta(min_length=1, max_length=LOOKUP_NAMESPACES_MAX),
    ]
    hashes: bytes
    leading: bool = False


class Report(msgspec.Struct, array_like=True, tag=15):
    """Totals of a time, as nearly as it is known (`kvstore.ledger.totals`), at most rows of them, and the heaviest prefixes.
    Answer: StatusReport of `answers.Report`."""

    since_s: Annotated[float, Meta(ge=0, le=1e12)]
    skip: _Id = 0
    until_s: Annotated[float, Meta(ge=0, le=1e12)] = 1e12


class Namespaces(msgspec.Struct, array_like=True, tag=16):
    """All namespaces in the order in which they came, as many as fit an answer. Answer: StatusReport of
    `answers.Namespaces`."""

    skip: _Id = 0


class Unregister(msgspec.Struct, array_like=True, tag=17):
    """This connection does not use the namespace any more. end: no client ever will: it is gone for all at
    once, and its blocks are dropped. Answer: Done."""

    namespace: _Id
    end: bool = False


class Fill(msgspec.Struct, array_like=True, tag=18):
    """These columns of leases that a client without the arena holds are written. fills: (lease, column, checksums
    of the column in each slot, joined; none of them: it will not be written, give the lease up). The last column
    of a lease commits it. A lease that is not held any more is no error. life: of the daemon that granted them, as
    Welcome named it; 0: a client that does not say. Answer: Filled."""

    fills: Annotated[list[tuple[_Lease, _Id, bytes]], Meta(max_length=FILLS_MAX)]
    life: _Id = 0


class Windows(msgspec.Struct, array_like=True, tag=19):
    """Up to where do KV groups that need only the end of a prefix, sliding windows and states, have what they need to go on? groups:
    namespaces, and how many tokens before the next one each needs. hashes: of the whole prompt, one every hash_tokens. held_tokens,
    reach_tokens: what lookups of the other groups found, without and with what is being written; a hit is a multiple of align_tokens.
    The rest as in Lookup. Answer: Count, in tokens."""

    groups: Annotated[list[tuple[_Id, _Tokens]], Meta(min_length=1, max_length=LOOKUP_NAMESPACES_MAX)]
    hashes: bytes
    hash_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    align_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    held_tokens: _Tokens
    reach_tokens: _Tokens
    ticket: _Id = 0
    local_tokens: _Tokens = 0
    prefill_tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    lasting: bool = True


class Record(msgspec.Struct, array_like=True, tag=41):
    """Record the requests that engines ask for; from the second one on: what came since the one before. Ends with
    the connection. Answer: Recorded."""


# Retention (tags 32 to 39): each is answered when the rule is on disk -------------------

_Selector = Annotated[str, Meta(max_length=2 * DIGEST_BYTES, pattern="^[0-9a-fA-F]*$")]
_Hash = Annotated[bytes, Meta(max_length=HASH_BYTES_MAX)]
_Size = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]  # -1: as it is


class SetPin(msgspec.Struct, array_like=True, tag=32):
    """Keep a prefix, named by its last block, from being evicted; not pinned: no longer. namespace: a unique
    beginning of its digest in hex, "" for those that hold the block. Answer: StatusReport, `namespaces`: the digests that it is about, in hex."""

    namespace: _Selector
    hash: _Hash
    pinned: bool


class SetTtl(msgspec.Struct, array_like=True, tag=33):
    """Drop blocks so many seconds (None: never) after they were stored: those of a prefix and below (with a
    hash), of a namespace (without), or of a tenant (not None). not is_set: remove that rule. Answer: as SetPin."""

    namespace: _Selector
    hash: _Hash
    tenant: _Text | None
    ttl_s: Annotated[float, Meta(gt=0, le=1e12)] | None
    is_set: bool


class SetQuota(msgspec.Struct, array_like=True, tag=34):
    """Bytes that a namespace, or a tenant (not None), may hold in each tier; None: no limit. Answer: as SetPin."""

    namespace: _Selector
    tenant: _Text | None
    dram_bytes: _Size | None
    nvme_bytes: _Size | None


class Retention(msgspec.Struct, array_like=True, tag=35):
    """All pins, TTLs and quotas. Answer: StatusReport of `answers.Retention`."""


class Clear(msgspec.Struct, array_like=True, tag=36):
    """Drop what this node's tiers hold of a prefix, named by its last block, of a namespace (without a hash), of a tenant
    (not None), or everything; pinned blocks stay. dry: drop nothing, say what would be. Answer: StatusReport; docs/cli.md
    names its fields."""

    namespace: _Selector
    hash: _Hash
    tenant: _Text | None
    everything: bool
    dry: bool


class FindPrefixes(msgspec.Struct, array_like=True, tag=37):
    """Which block hashes begin with these hex digits? namespace: as in SetPin. Answer: StatusReport, `hashes`: a few of
    them, in hex; a whole hash is its own answer, known or not."""

    namespace: _Selector
    beginning: Annotated[str, Meta(pattern="^[0-9a-f]{4,128}$")]


# Models in DRAM (tags 48 to 52) ----------------------------------------------------------

# As in replication.formats.manifests, which is not imported here: model and revision, of 96 letters each at most.
_Label = Annotated[
    str, Meta(max_length=LABEL_BYTES_MAX, pattern=r"^[a-z0-9][a-z0-9._-]{0,95}@[a-z0-9][a-z0-9._-]{0,95}\Z")
]
_Content = Annotated[bytes, Meta(min_length=CONTENT_BYTES, max_length=CONTENT_BYTES)]
_Slab = Annotated[int, Meta(ge=0, lt=SLABS_MAX)]
ModelSource = Literal["dram", "disk", "bucket", "peers"]


class ReserveModel(msgspec.Struct, array_like=True, tag=48):
    """Have slabs of the arena for a model that this connection alone fills, until it is whole or the connection ends; KV
    gives way in the background: asked again, more may be there. content: the first bytes of its digest. count: of slabs. start:
    the first slab that the answer is about. Answer: ModelSlabs."""

    label: _Label
    content: _Content
    count: Annotated[int, Meta(gt=0, le=SLABS_MAX)]
    start: _Slab = 0


class CommitModel(msgspec.Struct, array_like=True, tag=49):
    """All bytes of these slabs are there, with these checksums, joined. Answer: Done."""

    label: _Label
    indexes: Annotated[list[_Slab], Meta(max_length=MODEL_SLABS_MAX)]
    checksums: bytes


class AttachModel(msgspec.Struct, array_like=True, tag=50):
    """Use a model until this connection ends, if it is whole. start: as in ReserveModel. Answer: ModelSlabs."""

    label: _Label
    start: _Slab = 0


class DropModel(msgspec.Struct, array_like=True, tag=51):
    """Give the slabs of a model back, unless it is used. Answer: Done."""

    label: _Label


class ListModels(msgspec.Struct, array_like=True, tag=52):
    """Answer: StatusReport, `models`: a list of `answers.Model`; `capacity_bytes`, `slab_bytes`."""


class ModelLoaded(msgspec.Struct, array_like=True, tag=53):
    """This process has loaded a model's weights, or its part of them: bytes by where they came from. Answer: Done."""

    label: _Label
    by_source: Annotated[dict[ModelSource, Annotated[int, Meta(ge=0, le=1 << 60)]], Meta(max_length=4)]
    seconds: Annotated[float, Meta(ge=0, le=1e9)]


# Seeing it live -------------------------------------------------------------------------


NO_MINUTES: Final = 1e12  # unix seconds: none begins so late


class Live(msgspec.Struct, array_like=True, tag=40):
    """What is going on, in one small answer that may be asked for every second; minutes: those from this time on (unix
    seconds). Answer: StatusReport of `answers.Live`."""

    minutes_since_s: Annotated[float, Meta(ge=0, le=NO_MINUTES)] = 0.0


class Clients(msgspec.Struct, array_like=True, tag=54):
    """Who is connected, in the order in which they came, as many as fit an answer. Answer: StatusReport of `answers.Clients`."""

    skip: _Id = 0


class KillClient(msgspec.Struct, array_like=True, tag=55):
    """Hang up on the client with this number: what it holds goes back. It may connect again. Answer: StatusReport of
    `answers.Client`."""

    number: _Id


class SlowRequests(msgspec.Struct, array_like=True, tag=56):
    """The last slow requests. Answer: StatusReport of `answers.SlowRequests`."""


class Chain(msgspec.Struct, array_like=True, tag=46):
    """The hashes of a prefix, named by its last block, as far as the index knows it. namespace: a beginning of a digest, ""
    for all. Answer: StatusReport, `chains`: (digest, hashes joined) of each namespace that knows the block."""

    namespace: _Selector
    hash: _Hash


class WarmPrefix(msgspec.Struct, array_like=True, tag=45):
    """Begin to bring a prefix, named by its last block, into DRAM; asked again on the same connection: go on. namespace: a
    beginning of a digest, "" for all. Answer: StatusReport; docs/cli.md names its fields."""

    namespace: _Selector
    hash: _Hash


# Disks -----------------------------------------------------------------------------------


class SetDisk(msgspec.Struct, array_like=True, tag=38):
    """Take what is at an NVMe directory now as the disk that belongs there (accept), or remember nothing of it. Answer:
    StatusReport; docs/cli.md names its fields."""

    directory: Annotated[str, Meta(max_length=4096)]
    accept: bool


# Settings -------------------------------------------------------------------------------


class GetSettings(msgspec.Struct, array_like=True, tag=43):
    """The settings in force: of one key, of a section, or ("") all. Answer: StatusReport, `settings`; docs/cli.md names
    their fields."""

    name: _Text = ""


class SetSetting(msgspec.Struct, array_like=True, tag=44):
    """Give a key another value, written as in `--set`, until a restart or a reload; only for those who did not attach.
    Answer: StatusReport; docs/cli.md names its fields."""

    key: _Text
    text: Annotated[str, Meta(max_length=SETTING_CHARS_MAX)]


# Answers ----------------------------------------------------------------------------


class Welcome(msgspec.Struct, array_like=True, tag=64):
    """instance: who answers; life: a number of its own since its last start. lock_base: while a client writes it locks byte lock_base of the
    third file (OFD write lock) and, with a read lock, if it can, byte lock_base + owner of the arena file; it looks at the
    generations once it has the first lock. generations_bytes: how much of the table file it maps, to read the generations at the offsets that Reserved and Acquired name.
    Without attach all but life are 0."""

    protocol: int
    instance: str
    arena_bytes: int
    owner: int
    lock_base: int
    generations_bytes: int = 0
    life: int = 0


class Registered(msgspec.Struct, array_like=True, tag=65):
    namespace: int


class Count(msgspec.Struct, array_like=True, tag=66):
    """writing: of a lookup: how many blocks behind those counted are being written, or held behind such ones; of windows, tokens."""

    value: int
    writing: int = 0


class Places(msgspec.Struct, array_like=True, tag=67):
    """One byte a hash: 0 absent, WRITING, else IN_DRAM | IN_NVME | BROKEN_PREFIX."""

    residency: bytes


class Extents(msgspec.Struct, array_like=True, gc=False):
    """Slots of the arena. runs: (number of slots, offset of the first, offset of its generation) of slots that
    lie one behind the other, `slot_bytes` each. generations: of all slots, u64, little endian."""

    slot_bytes: int
    runs: list[tuple[int, int, int]]
    generations: bytes

    def offsets(self) -> Iterator[int]:
        """Of each slot."""
        for count, offset, _ in self.runs:
            yield from range(offset, offset + count * self.slot_bytes, self.slot_bytes)


class Reserved(msgspec.Struct, array_like=True, tag=68):
    """granted: one byte a hash, 1 where it has the next slot of `extents`. full: no room for the rest.
    lease is 0 where there are no slots."""

    lease: int
    granted: bytes
    extents: Extents
    full: bool


class Acquired(msgspec.Struct, array_like=True, tag=69):
    """tiers: one byte a hash: where it was when asked for, and is in the next slot of `extents`; 0 for a miss.
    pending: some are missing only because they are still on the way, or because the connection may hold no
    more at once: ask again, after releasing. lease is 0 where all are missing. checksums: of the slots, joined, where they are
    wanted."""

    lease: int
    tiers: bytes
    extents: Extents
    pending: bool
    checksums: bytes = b""


class Filled(msgspec.Struct, array_like=True, tag=74):
    """How many blocks each fill has committed: 0 while columns are missing, or where its lease is gone. refused:
    (position of a fill, code, message) of those that made no sense; the others are not touched by it."""

    committed: list[int]
    refused: list[tuple[int, str, str]] = []


class ModelSlabs(msgspec.Struct, array_like=True, tag=76):
    """state: whole, filling, damaged, verifying, partial. indexes, ready: of the slabs that there are from `start` on, at most
    MODEL_SLABS_MAX; their places in `extents`, whose slots are whole slabs. There are none for who may not have them now.
    user_lock: the byte that a process locks, shared, in the file of the slabs for as long as it uses the model."""

    state: str
    count: int
    content: bytes
    indexes: list[int]
    ready: bytes
    extents: Extents
    user_lock: int


class Done(msgspec.Struct, array_like=True, tag=70):
    pass


class StatusReport(msgspec.Struct, array_like=True, tag=71):
    """report: one of those in `kvstore.protocol.answers`, or some fields by name."""

    report: Mapping[str, Any]


class Problems(msgspec.Struct, array_like=True, tag=72):
    lines: list[str]


class Explained(msgspec.Struct, array_like=True, tag=73):
    """For each namespace one byte a hash, as in Places; and the outcome of each block, by its number in
    kvstore.outcomes. load_s: how long loading what would hit into DRAM is expected to take."""

    residency: list[bytes]
    outcomes: bytes
    load_s: float = 0.0


class Asked(msgspec.Struct, array_like=True, gc=False):
    """A request of an engine. number: in its recording. at_s: by the daemon's clock. space: digest of the (first)
    namespace; hashes: of the prompt's whole blocks, hash_bytes each; block_bytes: what a block takes in a tier. open: there may be news of
    its output."""

    number: int
    open: bool
    at_s: float
    tokens: int
    space: bytes
    hash_bytes: int
    block_tokens: int
    block_bytes: int
    hashes: bytes


class Recorded(msgspec.Struct, array_like=True, tag=75):
    """requests: the next ones; left: how many wait to be asked for. stored: (number, leading tokens of prompt and
    output that were offered for storing), of those for which there is news. lost: requests so far that were not
    fetched in time. now_s: as at_s."""

    now_s: float
    requests: list[Asked]
    left: int
    stored: list[tuple[int, int]]
    lost: int


class Error(msgspec.Struct, array_like=True, tag=127):
    """A refusal; code is one of those in kvstore.errors."""

    code: str
    message: str


Request = (
    Register
    | Lookup
    | Windows
    | Residency
    | Reserve
    | Commit
    | Acquire
    | Release
    | Prefetch
    | Status
    | Check
    | Ping
    | Settle
    | Explain
    | Report
    | Namespaces
    | Unregister
    | Fill
    | SetPin
    | SetTtl
    | SetQuota
    | Retention
    | Clear
    | FindPrefixes
    | Record
    | Live
    | Clients
    | KillClient
    | SlowRequests
    | Chain
    | WarmPrefix
    | GetSettings
    | SetSetting
    | SetDisk
    | ReserveModel
    | CommitModel
    | AttachModel
    | DropModel
    | ListModels
    | ModelLoaded
)
Answer = (
    Registered
    | Count
    | Filled
    | Places
    | Reserved
    | Acquired
    | Done
    | StatusReport
    | Problems
    | Explained
    | Recorded
    | ModelSlabs
    | Error
)

_encoder = msgspec.msgpack.Encoder()


def encode_frame_into(message: msgspec.Struct, buffer: bytearray) -> None:
    """Replace the content of `buffer` by the frame of `message`; its memory is reused."""
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    HEADER.pack_into(buffer, 0, len(buffer) - HEADER_BYTES)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """The frame of `message`, in fresh memory."""
    buffer = bytearray(256)
    encode_frame_into(message, buffer)
    return buffer


hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder: msgspec.msgpack.Decoder[Welcome | Error] = msgspec.msgpack.Decoder(Welcome | Error)
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def fields_bytes(fields: dict[str, str]) -> int:
    """How large the readable identity of a namespace is."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in fields.items())


_PLACE = re.compile(r"^(.*) - at `\$\[(\d+)\](.*)`$", re.DOTALL)


def in_words(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """What is wrong with a message of this kind, with the name of the field instead of its position."""
    found = _PLACE.match(str(error))
    if found is None:
        return str(error)
    what, position, inside = found.groups()
    names = kind.__struct_fields__
    at = int(position) - 1  # behind the tag
    return f"{names[at]}{inside}: {what}" if 0 <= at < len(names) else str(error)
