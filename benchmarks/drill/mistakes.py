"""What people get wrong: a quota that is too small, an engine that is set up unlike the others."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.drill.fault import Cause, Fault
from benchmarks.drill.node import Node
from benchmarks.drill.traffic import FIELDS, Traffic


class Quota(Fault):
    causes = (Cause("quota", "acme", "keeps out"),)
    tier: ClassVar[str]

    def break_(self, node: Node) -> None:
        self._set(node, "256KiB")  # half a prompt

    def mend(self, node: Node) -> None:
        self._set(node, "none")

    def _set(self, node: Node, size: str) -> None:
        socket = f"--socket={node.place.socket}"
        done = node.cli("quota", "--tenant", "acme", f"--{self.tier}", size, socket)
        if done.returncode:
            raise RuntimeError(done.stderr)


class DramQuota(Quota):
    name = "DRAM quota by mistake"
    tier = "dram"


class DiskQuota(Quota):
    name = "disk quota by mistake"
    tier = "nvme"

    def prepare(self, node: Node) -> None:
        node.settings["durable.rule"] = "off"  # else the bucket has what the disks may not hold


class OtherEngine(Fault):
    """It is sent prompts that the others have computed."""

    field: ClassVar[str]
    value: ClassVar[str]

    def prepare(self, node: Node) -> None:
        fields = {**FIELDS, self.field: self.value}
        self._other = Traffic(node.place.socket, fields, after=node.traffic)
        node.callback(self._other.stop)

    def break_(self, node: Node) -> None:
        self._other.start()

    def mend(self, node: Node) -> None:
        self._other.stop()


class OtherDtype(OtherEngine):
    name = "engine of another dtype"
    field, value = "dtype", "float8_e4m3"
    causes = (Cause("engines", ".*dtype float8_e4m3", "they share nothing"),)


class OtherSeed(OtherEngine):
    name = "engine of another hash seed"
    field, value = "hash seed", "1234"
    causes = (Cause("engines", ".*hash seed 1234", "they share nothing"),)
