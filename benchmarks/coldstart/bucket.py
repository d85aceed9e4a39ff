"""The bucket of benchmarks.coldstart: one that is named, or one on this machine, whose server shares its cores.

    --endpoint URL --bucket NAME      whatever it is
    radosgw                           where Ceph is installed (benchmarks/regions)
    moto                              else: an emulator in Python, which is the limit then

Its keys are in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import open_objects
from tiers.bucket.object_urls import open_store
from tiers.bucket.objects import Objects

PREFIX = "coldstart-bench"
BUCKET_REGION = "us-east-1"


@dataclass(frozen=True)
class Bucket:
    """server: for people."""

    server: str
    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{PREFIX}"

    def objects(self) -> Objects:
        return open_objects(self.url, self._options())

    def store(self) -> Any:
        return open_store(self.url, self._options())[1]

    def environment(self) -> dict[str, str]:
        """For clients of others, beside the keys."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": BUCKET_REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }

    def facts(self) -> dict[str, str]:
        return asdict(self)

    def _options(self) -> ObjectOptions:
        is_plain = self.endpoint.startswith("http:")
        return ObjectOptions(endpoint=self.endpoint, region=BUCKET_REGION, allow_http=is_plain)


@contextmanager
def opened(endpoint: str, name: str, scratch: Path) -> Iterator[Bucket]:
    """endpoint: "" for a server that is started here, with its files in scratch, and stopped again."""
    if endpoint:
        yield Bucket(endpoint, endpoint, name)
        return
    from benchmarks.regions.servers import S3  # which needs more than the clients of a bucket

    with S3(scratch / "s3") as s3:
        s3.make_bucket(name)
        yield Bucket(f"{s3.name}, on the same cores", s3.endpoint, name)
