"""Whose the other end of a TCP connection is, as the kernel of this machine says.

    our end, their end ──▶ sock_diag (netlink): that one socket ──▶ uid
                               └─ not there, or no answer ──▶ /proc/net/tcp ──▶ uid, or nobody that we know

Asked anew for each call: a port that one user gave back is another's a moment later. The first way takes about 10 µs, the second
milliseconds, and is for kernels that do not answer the first. Of a connection from another host or network namespace neither
says anything.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

PROC: Final = Path("/proc/self/net")

_ESTABLISHED: Final = 1  # others may have lost their user: the kernel says 0, which is root's
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # netlink's numbers
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ASKED = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_NO_COOKIE = b"\xff" * 8
_STATE_AT, _UID_AT = _HEADER.size + 1, _HEADER.size + 4 + 48 + 12
_ANSWER_S = 0.1


class End(NamedTuple):
    """An IPv4 address is the same however it is written."""

    address: IPv4Address | IPv6Address
    port: int


def end_of(name: tuple[Any, ...]) -> End:
    """As sockets name their ends: (address, port, …). Raises ValueError."""
    return End(_plain(ip_address(str(name[0]).partition("%")[0])), int(name[1]))


def user_of(theirs: End, ours: End, proc: Path = PROC) -> int | None:
    """The uid of who made the connection, while it lasts; None where the kernel does not know it."""
    uid = _asked(theirs, ours)
    if uid is not None:
        return uid
    for local, remote, found in _sockets(proc):
        if (local, remote) == (theirs, ours):
            return found
    return None


def _asked(theirs: End, ours: End) -> int | None:
    if theirs.address.version != ours.address.version:
        return None
    family = socket.AF_INET if theirs.address.version == 4 else socket.AF_INET6
    ends = b"".join(end.address.packed.ljust(16, b"\0") for end in (theirs, ours))
    body = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFF_FFFF)
    body += struct.pack("!HH", theirs.port, ours.port) + ends + struct.pack("=I", 0) + _NO_COOKIE
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_S)
            kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY or answer[_STATE_AT] != _ESTABLISHED:
        return None
    return int(struct.unpack_from("=I", answer, _UID_AT)[0])


def _sockets(proc: Path) -> Iterator[tuple[End, End, int]]:
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / name).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for row in rows:
            fields = row.split()
            if int(fields[3], 16) == _ESTABLISHED:
                yield _parsed(fields[1]), _parsed(fields[2]), int(fields[7])


def _parsed(text: str) -> End:
    """ "0100007F:1F90": words of four bytes, each as this processor has it, and the port."""
    digits, _, port = text.partition(":")
    words = (bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    return End(_plain(ip_address(b"".join(words))), int(port, 16))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return getattr(address, "ipv4_mapped", None) or address
