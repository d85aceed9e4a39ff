"""What can go wrong, grouped by when it happens.

    KvstoreError
    ├── StartError          the daemon does not start; nothing was changed
    ├── RequestError        the daemon refuses one request; `code` travels in the Error frame
    │   └── ConnectionRefusal   …and closes the connection after saying so
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


class StartError(KvstoreError):
    """The daemon cannot start; the message names the setting or the file to look at."""


class DataDirBusy(StartError):
    """Another process holds the data dir; `pid` is its number where it is known."""

    def __init__(self, path: object, pid: int | None) -> None:
        holder = f"pid {pid}" if pid is not None else "another process"
        super().__init__(f"data_dir {path}: in use by {holder}; stop it first, or use another data_dir")
        self.pid = pid


class DataDirNotOurs(StartError):
    """The data dir holds something else, or another format version; nothing was touched."""


class DataDirError(StartError):
    """The data dir cannot be made, read or written."""


class SettingError(StartError):
    """A setting has a value that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"setting {key} = {value!r}: allowed is {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class SocketBusy(StartError):
    """Another daemon answers at this socket path."""


class SocketPathError(StartError):
    """The socket cannot be made at this path: too long, no such directory, or something else lives there."""


# Refusing a request -----------------------------------------------------------------


class RequestError(KvstoreError):
    """A request that is refused; the connection goes on."""

    code: ClassVar[str] = "refused"


class BadRequest(RequestError):
    """A field has a wrong type, length or value."""

    code = "bad_request"


class UnknownNamespace(RequestError):
    """The namespace id was not registered on this connection."""

    code = "unknown_namespace"


class NamespaceConflict(RequestError):
    """The namespace digest is registered already, with other sizes."""

    code = "namespace_conflict"


class UnknownLease(RequestError):
    """The lease is not one that this session holds."""

    code = "unknown_lease"


class IndexNotReserved(RequestError):
    """A commit names an index that its lease did not reserve."""

    code = "index_not_reserved"


class LimitExceeded(RequestError):
    """The request asks for more than one connection may have."""

    code = "limit_exceeded"


class NotFound(RequestError):
    """What the request names is not known here."""

    code = "not_found"


class NotSaved(RequestError):
    """A rule could not be put on disk; nothing was changed."""

    code = "not_saved"


class NotAttached(RequestError):
    """The request needs the arena, but the session said Hello without attaching."""

    code = "not_attached"


class InternalError(RequestError):
    """The daemon failed while answering; its log has the cause."""

    code = "internal"


class ConnectionRefusal(RequestError):
    """The connection is closed after one Error frame."""

    code = "connection_refused"


class BadFrame(ConnectionRefusal):
    """What arrived is not a frame of the protocol."""

    code = "bad_frame"


class FrameTooLarge(ConnectionRefusal):
    """A frame claims more bytes than the protocol allows."""

    code = "frame_too_large"


class WrongPeer(ConnectionRefusal):
    """The peer runs as another user."""

    code = "wrong_peer"


class WrongProtocol(ConnectionRefusal):
    """The peer speaks another version of the protocol."""

    code = "wrong_protocol"


class TooManyConnections(ConnectionRefusal):
    """The daemon serves as many connections as it may."""

    code = "too_many_connections"


class TooSlow(ConnectionRefusal):
    """The peer left a frame half sent, or answers unread, for too long."""

    code = "too_slow"


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
