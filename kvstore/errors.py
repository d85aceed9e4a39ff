"""What can go wrong, grouped by when it happens.

    KvstoreError
    ├── ConfigError         settings cannot be used
    ├── StartError          the daemon does not start; nothing was changed
    ├── RequestError        the daemon refuses one request; `code` travels in the Error frame
    │   └── ConnectionRefused   …and closes the connection after saying so
    ├── ReplayError         a trace cannot be read
    ├── WorkerError         a process that computed for us died
    └── ClientError         what a call of `kvstore.client` may raise, and nothing else

Light on purpose: the client imports this module inside inference engines.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from typing import ClassVar


class KvstoreError(Exception):
    """Any failure of ours; the message says what, where, and what is allowed."""


# Starting the daemon ----------------------------------------------------------------


class ConfigError(KvstoreError):
    """The configuration cannot be used. problems: one clear line each."""

    def __init__(self, problems: list[str], missing_file: bool = False) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.missing_file = missing_file


class StartError(KvstoreError):
    """The daemon cannot start; the message names the setting or the file to look at.

    heals: starting again may help, without anybody changing a setting. is_missing: what was named is not there.
    """

    heals = True
    is_missing = False


class StartSettingError(StartError):
    """A setting that cannot work on this machine."""

    heals = False


class TooFewDescriptors(StartSettingError):
    """The process may open too few files."""


class MemoryShort(StartError):
    """There is not enough free memory at the moment."""


class DataDirBusy(StartError):
    """Another process holds the data dir; `pid` is its number where it is known."""

    def __init__(self, path: object, pid: int | None) -> None:
        holder = f"pid {pid}" if pid is not None else "another process"
        super().__init__(f"data_dir {path}: in use by {holder}; stop it first, or use another data_dir")
        self.pid = pid


class DataDirNotOurs(StartSettingError):
    """The data dir holds something else, or another format version; nothing was touched."""


class DataDirError(StartError):
    """The data dir cannot be made, read or written."""

    def __init__(self, message: str, heals: bool = False, is_missing: bool = False) -> None:
        super().__init__(message)
        self.heals, self.is_missing = heals, is_missing


class SocketBusy(StartError):
    """Another daemon answers at this socket path."""


class SocketPathError(StartSettingError):
    """The socket cannot be made at this path: too long, no such directory, or something else lives there."""


# Refusing a request -----------------------------------------------------------------


class RequestError(KvstoreError):
    """A request that is refused; the connection goes on. Its code is its name, in words."""

    code: ClassVar[str] = "refused"

    def __init_subclass__(cls) -> None:
        cls.code = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__)[1:]


class BadRequest(RequestError):
    """A field has a wrong type, length or value."""


class UnknownNamespace(RequestError):
    """The namespace id was not registered on this connection."""


class NamespaceConflict(RequestError):
    """The namespace digest is registered already, with other sizes."""


class UnknownLease(RequestError):
    """The lease is not one that this session holds, or its time has run out."""


class LeaseExpired(RequestError):
    """A lease was held for too long, and taken back: its client hangs, or leaks leases."""


class IndexNotReserved(RequestError):
    """A commit names an index that its lease did not reserve."""


class LimitExceeded(RequestError):
    """The request asks for more than one connection may have."""


class NotKnown(RequestError):
    """Who asks has shown nothing that is known here: no certificate, no token, and is not the daemon's user."""


class NotAllowed(RequestError):
    """Who asks has no right to this kind of request."""


class NotFound(RequestError):
    """What the request names is not known here."""


class InUse(RequestError):
    """A process uses what should change; nothing was changed."""


class Failed(RequestError):
    """It cannot be done as things are; the message says what stands in its way."""


class NotReady(RequestError):
    """The daemon cannot do this yet, so soon after its start; nothing was changed."""


class NotSaved(RequestError):
    """A rule could not be put on disk; nothing was changed."""


class Internal(RequestError):
    """The daemon failed while answering; its log has the cause."""


class ConnectionRefused(RequestError):
    """The connection is closed after one Error frame."""


class BadFrame(ConnectionRefused):
    """What arrived is not a frame of the protocol. Once a peer is greeted, where the frame ends is known: it goes on."""


class FrameTooLarge(ConnectionRefused):
    """A frame claims more bytes than the protocol allows."""

    def __init__(self, size_bytes: int, bytes_max: int) -> None:
        super().__init__(f"frame of {size_bytes} bytes: at most {bytes_max} are allowed")


class WrongPeer(ConnectionRefused):
    """The peer runs as another user."""


class WrongProtocol(ConnectionRefused):
    """The peer speaks another version of the protocol."""


class TooManyConnections(ConnectionRefused):
    """The daemon serves as many connections as it may."""


class CutOff(ConnectionRefused):
    """Somebody ended this connection with `kvstore clients --kill`."""


class TooSlow(ConnectionRefused):
    """The peer left a frame half sent, or answers unread, for too long."""


# Replaying a trace ------------------------------------------------------------------


class ReplayError(KvstoreError):
    """A trace cannot be read; the message names file and line."""


class WorkerError(KvstoreError):
    """A process that computed for us died."""


# Calling the daemon -----------------------------------------------------------------


class ClientError(KvstoreError):
    """Anything a client call raises."""


class Unavailable(ClientError):
    """The daemon is gone, hung or backing off, or the deadline passed; a later call reconnects by itself."""


class Refused(ClientError):
    """The daemon (or the client, before sending) refused the request: see `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class FillsRefused(Refused):
    """Some fills of a call made no sense; the others are done. refused: position -> why; committed: of all of them, as
    `Client.fill` returns it, 0 where refused."""

    def __init__(self, refused: dict[int, Refused], committed: list[int]) -> None:
        first = next(iter(refused.values()))
        super().__init__(first.code, first.message)
        self.refused, self.committed = refused, committed
