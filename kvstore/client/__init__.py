"""The client of the local door: what an inference engine (and every tool of ours) calls.

    client = Client("/run/kvstore/kvstore.sock", label="vllm rank 0")
    space = client.namespace(digest, record_bytes=2 << 20, hash_bytes=32, block_tokens=64, fields={})
    stored = client.put(space, hashes, b"", buffers)      # reserve ─▶ copy and sum ─▶ commit
    blocks = client.lookup([space], hashes)                # leading blocks, all namespaces
    copied = client.get(space, hashes[:blocks], into)      # acquire ─▶ copy ─▶ valid? ─▶ release

KV bytes are copied here, between the caller's memory and the shared arena; only names and
offsets go over the socket. For device memory, take `arena` (its address can be registered
with the driver) and copy to and from the slots of `reserve` and `acquire`.

What a caller may rely on:

* every call ends within its deadline (`timeout_s`, plus `wait_s` where there is one); put and
  get take one lease after another, and say themselves how long that may last;
* it raises Unavailable or Refused and nothing else. What cannot succeed, a wrong argument of whatever kind
  included, is Refused before a byte is sent: the connection and all leases stay;
* after Unavailable, calls fail at once without a system call until the backoff is over,
  then the next one reconnects; namespaces are registered again by themselves;
* any thread may call: one call is on the wire at a time, the others wait for it within their
  own deadline. Copies are not serialised. Giving a lease back waits for nothing. Use a second client where a long `wait_s` would be in the way of short calls;
* a forked child may call too: it connects anew. Leases stay with the process that made them.

Light on purpose: importing this costs a few milliseconds; the rest comes with the first call.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.client.arena_view import ArenaView
from kvstore.client.calls import LEASE_HASHES_MAX, WAIT_S_MAX, Calls, Leading, require_run
from kvstore.client.leases import Grant, GrantedSlots, ReadLease, Slot, SlotLease, WriteLease
from kvstore.client.namespace import Namespace
from kvstore.client.refusing import refusing, require, require_number, wrong
from kvstore.errors import ClientError, FillsRefused, Refused, Unavailable
from kvstore.protocol.places import default_socket
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME, WRITING
from tiers import copying

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "IN_ANY",
    "IN_DRAM",
    "IN_NVME",
    "WRITING",
    "ArenaView",
    "Client",
    "ClientError",
    "FillsRefused",
    "Grant",
    "GrantedSlots",
    "Leading",
    "Namespace",
    "ReadLease",
    "Refused",
    "Slot",
    "SlotLease",
    "Unavailable",
    "WriteLease",
    "copying",
    "default_socket",
]

LEASE_BYTES_MAX = 512 << 20  # per lease of put and get: bounds what one call pins
SLOT_BYTES_MIN = 16 << 10  # of tiers/constants.py, which would import more than all of this
PUT_BLOCKS_MAX = 176  # per lease of a put: 512 blocks, a prompt of 8,192 tokens, are three
PUT_SHARE_MAX = 0.125  # of the arena, per lease of a put, which has two at a time
GET_SHARE_MAX = 0.25  # of the arena, per lease of a get
LEASES_SHARE_MAX = 0.5  # of the arena, all leases of a connection (`door.lease_share_max`)
ASK_AGAIN_S = 0.005  # between two asks of get that brought nothing


@refusing
class Client(Calls):
    """One process's connection to the daemon. See the module's head for what holds for every call.

    A put asks for its next lease before it copies into this one, and waits for its commits later: small
    blocks cost the daemon as long as they cost us.

        this process   reserve 1 ─▶ copy 1 ─▶ commit 1 ─▶ copy 2 ─▶ commit 2 ─▶ …
        the daemon               reserve 2 ─────▶ commit 1, reserve 3 ─────▶ …
    """

    def put(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes, buffers: Sequence[ReadableBuffer]
    ) -> int:
        """Store consecutive blocks from host memory; answers how many were stored now.

        buffers: one contiguous buffer of record_bytes per hash. Blocks held already are skipped
        and not counted; a full arena ends the put early. Copies with two threads.

        It takes ceil(bytes / lease) leases, two at a time; one holds up to 176 blocks, 512 MiB and an eighth
        of the arena. Each call of the daemon has its own deadline of timeout_s. After
        leases x timeout_s no new lease is begun, so that the put of a client that no other thread uses, the time
        of copying aside, lasts at most (leases + 4) x timeout_s; what was stored by then is answered.
        """
        _require_buffers(namespace, hashes, buffers)
        if not hashes:
            return 0
        require_run(namespace, hashes, parent)
        begun = time.monotonic()
        step = min(PUT_BLOCKS_MAX, self._blocks_per_lease(namespace, PUT_SHARE_MAX))
        give_up_at = begun + self._timeout_s * -(-len(hashes) // step)
        committed: deque[Callable[[float | None], int]] = deque()
        start = stored = 0
        is_ahead = self._blocks_per_lease(namespace, LEASES_SHARE_MAX) > 1  # there is room for two at a time

        def reserve(start: int) -> Callable[[float | None], WriteLease]:
            above = hashes[start - 1] if start else parent
            return self._reserve_soon(namespace, hashes[start : start + step], above)

        coming: Callable[[float | None], WriteLease] | None = reserve(0)
        try:
            while coming is not None:
                if len(committed) > 1:  # answered before the next lease is, with a deadline of its own
                    stored += committed.popleft()(self._deadline())
                this, coming = coming, None
                with this(self._deadline()) as lease:
                    following = start + step
                    goes_on = following < len(hashes) and not lease.full and time.monotonic() < give_up_at
                    if goes_on and is_ahead:
                        coming = reserve(following)
                    pairs = [(slot.view, buffers[start + slot.index]) for slot in lease.slots]
                    copy_begun = time.monotonic()
                    digests = copying.copy_and_digest(pairs, lease._touch, namespace.columns)
                    give_up_at += time.monotonic() - copy_begun
                    sums = {slot.index: digest for slot, digest in zip(lease.slots, digests, strict=True)}
                    committed.append(lease.commit_soon(sums))
                if goes_on and not is_ahead:
                    coming = reserve(following)
                start = following
        finally:
            if coming is not None:
                with contextlib.suppress(ClientError):
                    coming(self._deadline()).abort()
        return stored + sum(count(self._deadline()) for count in committed)

    def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        into: Sequence[WriteableBuffer],
        wait_s: float = 0.0,
        parent: bytes = b"",
    ) -> int:
        """Copy leading blocks to host memory; answers how many are there and true.

        parent: as in `acquire`. into: one contiguous writable buffer of record_bytes per hash; what lies behind the
        answered count is undefined. wait_s: for slower tiers (and for other threads' leases, where
        they leave no room for ours), over the whole call. Copies with two threads.

        One lease holds up to 512 blocks, 512 MiB and a quarter of the arena; deadlines are as for `put`: the
        time of copying aside, it lasts at most (leases + 2) x timeout_s + wait_s, and answers what was copied by then.
        """
        _require_buffers(namespace, hashes, into, is_writable=True)
        require_number("wait_s", wait_s, WAIT_S_MAX)
        begun, copied, copy_s = time.monotonic(), 0, 0.0
        step = self._blocks_per_lease(namespace, GET_SHARE_MAX) if hashes else 1
        patience_s = wait_s + self._timeout_s * -(-len(hashes) // step)
        while copied < len(hashes):
            wait_left_s = max(0.0, begun + wait_s + copy_s - time.monotonic())
            above = hashes[copied - 1] if copied else parent
            with self.acquire(namespace, hashes[copied : copied + step], wait_left_s, parent=above) as lease:
                run = lease.leading()
                copy_begun = time.monotonic()
                copying.copy([(into[copied + i], slot.view) for i, slot in enumerate(run)], lease._touch)
                copy_s += time.monotonic() - copy_begun
                true = min(len(run), lease.valid_count())
            copied += true
            if true < len(run) or (true < len(lease.slots) and not lease.pending):
                break
            if not run and wait_left_s == 0:
                break
            if time.monotonic() >= begun + patience_s + copy_s:
                break
            if not run:
                time.sleep(min(ASK_AGAIN_S, wait_left_s))
        return copied

    def _blocks_per_lease(self, namespace: Namespace, arena_share: float) -> int:
        """How many blocks one lease of put or get may hold; connects if need be."""
        lease_bytes = min(LEASE_BYTES_MAX, int(self.arena.size_bytes * arena_share))
        return max(1, min(LEASE_HASHES_MAX, lease_bytes // max(namespace.record_bytes, SLOT_BYTES_MIN)))


def _require_buffers(
    namespace: Namespace,
    hashes: Sequence[bytes],
    buffers: Sequence[ReadableBuffer],
    is_writable: bool = False,
) -> None:
    """Raises Refused."""
    namespace.joined(hashes)
    require(len(hashes) == len(buffers), f"{len(hashes)} hashes and {len(buffers)} buffers")
    size = namespace.record_bytes
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes != size or not view.c_contiguous or (is_writable and view.readonly):
            raise wrong(
                f"every buffer must be contiguous{' and writable' * is_writable} and have {size} bytes: others cannot be copied"
            )
