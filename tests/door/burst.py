"""The worst that legal peers can do to a daemon: `python -m tests.door.burst SOCKET PEERS`, until killed.

Each of the peers sends the heaviest requests in the largest bursts and never reads an answer; four
more read theirs, and go on for ever; another one takes leases by the dozen, of a size class of its own, and is gone, again and
again; and rules come and go. Prints "bursting" when all of them have begun.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import msgspec

from kvstore.protocol import frames
from tests.door.conftest import HASH_BYTES
from tests.door.peer import REGISTER, Peer


def heaviest(space: int) -> list[msgspec.Struct]:
    """One of each kind of request, as large as it may be."""
    missing = b"".join(number.to_bytes(HASH_BYTES, "big") for number in range(frames.HASHES_MAX))
    lease = missing[: frames.LEASE_HASHES_MAX * HASH_BYTES]
    return [
        frames.Lookup([space], missing),
        frames.Residency(space, missing),
        frames.Prefetch(space, missing),
        frames.Explain([REGISTER.digest], missing[: 60_000 * HASH_BYTES]),
        frames.Reserve(space, lease, b""),
        frames.Acquire(space, lease, 0),
        frames.Report(0.0),
        frames.Retention(),
        frames.Namespaces(),
        frames.Status(),
    ]


def main(path: Path, count: int) -> None:
    frame = [bytes(frames.encode_frame(request)) for request in heaviest(0)]
    small = bytes(frames.encode_frame(frames.Status())) * 5000
    silent = [Peer(path) for _ in range(count)]
    for peer in silent:
        peer.register()
        peer.socket.setblocking(False)
        with contextlib.suppress(OSError):  # as much as the kernel takes
            peer.socket.sendall(small)
    for first in range(4):
        threading.Thread(target=_go_on, args=(Peer(path), frame[first:] + frame[:first]), daemon=True).start()
    threading.Thread(target=_come_and_go, args=(path,), daemon=True).start()
    threading.Thread(target=_change_rules, args=(path,), daemon=True).start()
    print("bursting", flush=True)
    threading.Event().wait()


def _go_on(peer: Peer, burst: list[bytes]) -> None:
    peer.register()
    peer.socket.settimeout(60)
    while True:
        for request in burst:
            peer.socket.sendall(request)
            if not peer.receive():
                return


def _come_and_go(path: Path) -> None:
    """Leases of long runs, in records of other sizes than everybody's, and no goodbye."""
    life = 0
    while True:
        life += 1
        peer = Peer(path)
        peer.socket.settimeout(60)
        size = 4096 << life % 5
        space = peer.ask(
            frames.Register(b"burst%011d" % (life % 5), size, HASH_BYTES, 16, {"tenant": "burst"})
        )
        for lease in range(16):
            first = life % 50 * 10_000 + lease * frames.LEASE_HASHES_MAX
            run = range(first, first + frames.LEASE_HASHES_MAX)
            hashes = b"".join(number.to_bytes(HASH_BYTES, "big") for number in run)
            peer.ask(frames.Reserve(space.namespace, hashes, b""))
        peer.socket.close()


def _change_rules(path: Path) -> None:
    """A quota is lowered and lifted, prefixes are pinned and unpinned, all rules are told."""
    peer = Peer(path)
    peer.socket.settimeout(60)
    while True:
        for number in range(20):
            for request in (
                frames.SetQuota("", "burst", 1 << 20, None),
                frames.SetPin("", number.to_bytes(HASH_BYTES, "big"), True),
                frames.Retention(),
                frames.SetPin("", number.to_bytes(HASH_BYTES, "big"), False),
                frames.SetQuota("", "burst", None, None),
            ):
                peer.socket.sendall(frames.encode_frame(request))
                if not peer.receive():
                    return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
