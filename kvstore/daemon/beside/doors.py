"""Doors beside the daemon: `kvstore web` and `kvstore grpc`, processes of their own.

What they do costs milliseconds that engines would wait for; a probe from outside sees a daemon that hangs; and a crash of one
costs its connections, and the daemon nothing.
"""

from __future__ import annotations

import sys

from kvstore.daemon.beside.children import Lasting, in_force
from kvstore.daemon.config.config import Config
from kvstore.security.access import read_access
from kvstore.security.tls import read_pem

_OURS = (sys.executable, "-P", "-m", "kvstore")


def web_process(config: Config) -> Lasting:
    """Without web.listen there is none."""
    command = [
        *(*_OURS, "web"),
        f"--listen={config.web.listen}",
        f"--names={config.web.names}",
        f"--socket={config.socket_path}",
        f"--child={config.log.level},{config.log.format}",
        f"--access={config.security.access_file}",
        *(("--region", config.region, str(config.regions_file)) if config.regions_file else ()),
        *(("--tls", *map(str, config.web_tls)) if config.web_tls is not None else ()),
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


def require_doors(config: Config) -> None:
    """Raises StartError where a door could not let in who it should."""
    files, access = config.security.tls_files, config.security.access_file
    if files is not None and (config.grpc.listen or config.web_tls):
        read_pem(files)
    if access:
        read_access(access)
