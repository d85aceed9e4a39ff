"""Default places of socket and state: one rule for daemon, command line, client and connector.

                root                 others
    socket      /run/kvstore         /run/kvstore where they may write to it, as under our systemd unit;
                                     else $XDG_RUNTIME_DIR/kvstore or /run/user/UID/kvstore;
                                     else /tmp/kvstore-UID, mode 0700
    state       /var/lib/kvstore     /var/lib/kvstore where they may write to it;
                                     else $XDG_STATE_HOME/kvstore or ~/.local/state/kvstore;
                                     else /tmp/kvstore-UID/state

$KVSTORE_SOCKET_PATH says it for all of them, $KVSTORE_DATA_DIR for the daemon and the command line, and an explicit
path always wins. Light on purpose: engines import this.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_RUN, SYSTEM_STATE = "/run/kvstore", "/var/lib/kvstore"
SOCKET = "kvstore.sock"


def default_socket(environment: Mapping[str, str] = os.environ) -> str:
    """The path of the daemon's socket for this user."""
    named = environment.get("KVSTORE_SOCKET_PATH", "")
    return named if os.path.isabs(named) else os.path.join(run_directory(environment), SOCKET)


def default_data_dir(environment: Mapping[str, str] = os.environ) -> str:
    """The data dir of this user's daemon."""
    if os.geteuid() == 0 or _may_write(SYSTEM_STATE):
        return SYSTEM_STATE
    state = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = environment.get("HOME", "")
        state = os.path.join(home, ".local/state") if os.path.isabs(home) and _may_write(home) else ""
    return os.path.join(state, "kvstore") if state else os.path.join(fallback(), "state")


def run_directory(environment: Mapping[str, str] = os.environ) -> str:
    """The directory of the socket. It need not be there."""
    if os.geteuid() == 0 or _may_write(SYSTEM_RUN):
        return SYSTEM_RUN
    for place in (environment.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.geteuid()}"):
        if os.path.isabs(place) and _may_write(place):
            return os.path.join(place, "kvstore")
    return fallback()


def fallback() -> str:
    """The place of users who have no other; any user may make it, so look whose it is."""
    return f"/tmp/kvstore-{os.geteuid()}"  # noqa: S108 `make_directory` looks whose it is


def make_directory(directory: str) -> None:
    """Make a directory of this rule, private to us, with what is missing above it.

    Raises OSError: also where another user was first in /tmp.
    """
    os.makedirs(directory, 0o700, exist_ok=True)
    found = os.lstat(directory)
    if directory == fallback() and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()):
        raise PermissionError(errno.EPERM, "another user has made it", directory)


def _may_write(directory: str) -> bool:
    return os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)
