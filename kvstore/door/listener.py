"""The socket file of the door: bound under its own name, in place of a dead daemon's, and never of a live one's.

    lock the directory ─▶ is what is there dead? remove it ─▶ bind, mode 0600 ─▶ listen ─▶ unlock

The kernel names a socket as it was bound (/proc/net/unix), and systemd-tmpfiles leaves alone what is named there; so it is
bound under the name that it keeps. Between bind and listen it looks dead: no daemon looks while another one
has the directory locked. The lock (flock) is of the directory itself, for that moment only; it leaves no file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.constants import SOCKET_PATH_BYTES_MAX
from kvstore.errors import SocketBusy, SocketPathError

DOOR_BACKLOG = 512  # clients that may wait to be accepted
DOOR_PROBE_TIMEOUT_S = 1.0  # how long a daemon that owns the socket file has to answer
# For the lock of the socket's directory, while another daemon opens its own.
DOOR_LOCK_S, DOOR_LOCK_POLL_S = (5.0, 0.01)


class DoorSocket:
    """The listening, non-blocking `socket`, and the file that leads to it. For any thread but the engine's: all of it blocks."""

    def __init__(self, path: Path) -> None:
        """Open and listen. Raises SocketBusy, SocketPathError."""
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise SocketPathError(f"socket {path}: at most {SOCKET_PATH_BYTES_MAX} bytes of path are allowed")
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self.socket.fileno(), 0o600)  # what bind makes has this mode from its first moment
            with _locked(path):
                _remove_dead(path)
                self.socket.bind(_as_the_kernel_names(path))
                self.socket.listen(DOOR_BACKLOG)
                self._identity = _identity(path)
        except OSError as error:
            self.socket.close()
            raise SocketPathError(f"socket {path}: {error.strerror or error}") from error
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def is_in_place(self) -> bool:
        """Whether the file is still there, and ours. False where that cannot be known."""
        try:
            return _identity(self._path) == self._identity
        except OSError:
            return False

    def close(self) -> None:
        """Stop listening and remove the file, unless another daemon put its own there meanwhile."""
        if self.is_in_place():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.socket.close()


def _identity(path: Path) -> tuple[int, int]:
    """No other file has it while the socket is open."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _as_the_kernel_names(path: Path) -> str:
    """Without links on the way (/var/run is one), as those who look for it in /proc/net/unix spell it."""
    whole = os.path.join(os.path.realpath(path.parent), path.name)
    return whole if len(os.fsencode(whole)) <= SOCKET_PATH_BYTES_MAX else os.fspath(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises SocketBusy where another process has the directory locked for longer than a start takes."""
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up_s, pause = time.monotonic() + DOOR_LOCK_S, threading.Event()
    try:
        while True:
            try:
                fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise SocketBusy(
                        f"socket {path}: another process has {path.parent} locked (flock)"
                    ) from None
            except OSError:  # a file system without locks: nothing worse than before there were any
                break
            pause.wait(DOOR_LOCK_POLL_S)
        yield
    finally:
        os.close(directory_fd)


def require_free(path: Path) -> None:
    """So that a start that cannot have its socket takes no memory, and joins no region. Raises SocketBusy, SocketPathError."""
    with contextlib.suppress(OSError), _locked(path):  # else it is said when the socket is made
        _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Raises SocketBusy, SocketPathError, with whatever is there left alone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketPathError(f"socket {path}: something that is not a socket is there; it was left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(DOOR_PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # nobody listens: the daemon that made it is dead
            return
        except (BlockingIOError, TimeoutError):
            pass  # a daemon listens, and is too busy to accept
    raise SocketBusy(f"socket {path}: another daemon answers there")
