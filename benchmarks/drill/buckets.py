"""Faults of the region's bucket: what answers behind its address is a proxy, which does what networks and stores do."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.drill.fault import Cause, Fault
from benchmarks.drill.node import Node


class BucketFault(Fault):
    mode: ClassVar[str]

    def break_(self, node: Node) -> None:
        node.proxy.mode = self.mode

    def mend(self, node: Node) -> None:
        node.proxy.mode = "pass"


class BucketRefuses(BucketFault):
    name = "bucket 403"
    mode = "expired"
    causes = (Cause("credentials", "na", "403 ExpiredToken"),)


class BucketOverloaded(BucketFault):
    name = "bucket 503"
    mode = "503"
    causes = (Cause("bucket", "na", "503"),)


class BucketHangs(BucketFault):
    name = "bucket hangs"
    mode = "hang"
    causes = (Cause("bucket", "na", "did not end in time"),)


class BucketFlips(BucketFault):
    name = "bucket flips bytes"
    mode = "flip"
    causes = (
        Cause("lost", ".*packs", "came back with other bytes"),
        # Where the feed is read before any block is.
        Cause("gap", ".*feed/[0-9a-f]+", "its checksum does not match"),
    )

    def prepare(self, node: Node) -> None:
        node.disks = []  # so that more is fetched from the bucket


class BucketAway(BucketFault):
    name = "bucket away"
    mode = "away"
    causes = (Cause("bucket", "na"),)
