"""Doors beside the daemon: `kvstore web` and `kvstore grpc`, processes of their own.

What they do costs milliseconds that engines would wait for; a probe from outside sees a daemon that hangs; and a crash of one
costs its connections, and the daemon nothing.
"""

from __future__ import annotations

import sys

from kvstore.daemon.beside.children import Lasting, in_force
from kvstore.daemon.config.config import Config

_OURS = (sys.executable, "-P", "-m", "kvstore")


def web_process(config: Config) -> Lasting:
    """Without web.listen there is none."""
    command = [
        *(*_OURS, "web"),
        f"--listen={config.web.listen}",
        f"--names={config.web.names}",
        f"--socket={config.socket_path}",
        f"--child={config.log.level},{config.log.format}",
    ]
    return Lasting("kvstore web", command, bool(config.web.listen))


def grpc_process(config: Config) -> Lasting:
    """Without grpc.listen there is none."""
    s = config.security
    command = [
        *(*_OURS, "grpc"),
        f"--child={config.log.level},{config.log.format}",
        *in_force(config),
        f"--set=grpc.listen={config.grpc.listen}",
        f"--set=grpc.connection_age_s={config.grpc.connection_age_s}",
        f"--set=grpc.streams_max={config.grpc.streams_max}",
        f"--set=security.certificate_file={s.certificate_file}",
        f"--set=security.key_file={s.key_file}",
        f"--set=security.ca_file={s.ca_file}",
        f"--set=security.access_file={s.access_file}",
    ]
    return Lasting("kvstore grpc", command, bool(config.grpc.listen))
