"""The socket file of the door: appears complete under its name, replaces only a dead one's.

    bind to a temporary name ─▶ mode 0600 ─▶ listen ─▶ rename over the final name

Nobody sees a socket that does not listen or that others may write to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from kvstore.constants import DOOR_PROBE_TIMEOUT_S, SOCKET_PATH_BYTES_MAX
from kvstore.errors import SocketBusy, SocketPathError


class DoorSocket:
    """The listening, non-blocking `socket`, and the file that leads to it."""

    def __init__(self, path: Path, backlog: int) -> None:
        """Open and listen. Raises SocketBusy, SocketPathError."""
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise SocketPathError(f"socket {path}: at most {SOCKET_PATH_BYTES_MAX} bytes of path are allowed")
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _require_free(path)
            self._identity = _bind(self.socket, path, backlog)
        except OSError as error:
            self.socket.close()
            raise SocketPathError(f"socket {path}: {error.strerror or error}") from error
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stop listening and remove the file, unless another daemon put its own there meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                self._path.unlink()
        self.socket.close()


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _bind(listener: socket.socket, path: Path, backlog: int) -> tuple[int, int]:
    """Through the directory's descriptor, because the temporary name may be too long for a socket address."""
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f"/proc/self/fd/{directory_fd}/.{os.getpid()}.sock"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        listener.bind(temporary)
        os.chmod(temporary, 0o600)
        listener.listen(backlog)
        identity = _identity(temporary)
        os.rename(temporary, path)
        return identity
    finally:
        os.close(directory_fd)


def _require_free(path: Path) -> None:
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
            return  # nobody listens: the daemon that made it is dead
        except (BlockingIOError, TimeoutError):
            pass  # somebody listens, and is too busy to accept
    raise SocketBusy(f"socket {path}: another daemon answers there")
