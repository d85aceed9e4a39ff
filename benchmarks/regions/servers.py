"""The S3 server of the demo: radosgw where it is installed, else moto from the venv; and its buckets.

    with S3(directory) as s3:  s3.make_bucket("na")        s3.endpoint, s3.name

Its credentials are in this process's environment, where the commands that it starts find them.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.regions import radosgw
from tests.objects import S3Server

BUCKET_REGION = "us-east-1"
LOG_S_MAX = 30.0


class S3:
    """A server that runs. Context manager."""

    def __init__(self, home: Path, prefer_real: bool = True, beside: S3 | None = None) -> None:
        """home: made, for its files. beside: another one, with the same credentials. Raises radosgw.ServerError."""
        home.mkdir()
        self._server: Any
        if prefer_real and radosgw.is_installed():
            self.name, self._server = "radosgw", radosgw.Radosgw(home, beside.keys if beside else None)
            self.keys: tuple[str, str] = self._server.key, self._server.secret
        else:
            self.name, self._server = "moto", S3Server(None)
            self.keys = "demo", "demo"  # it believes any
        key, secret = self.keys
        self._asked = 0
        self.endpoint: str = self._server.endpoint
        os.environ.update(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_REGION=BUCKET_REGION)
        os.environ.pop("AWS_SESSION_TOKEN", None)
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name=BUCKET_REGION,
        )

    def make_bucket(self, name: str) -> None:
        self._client.create_bucket(Bucket=name)

    def reads(self, bucket: str, prefix: str) -> list[str]:
        """The objects below a prefix that were sent to somebody since the start, in order, as often as they were."""
        self._asked += 1
        mark = f"mark-{self._asked}"  # requests stand in the log in the order in which they ended
        self._client.list_objects_v2(Bucket=bucket, Prefix=mark)
        give_up_s = time.monotonic() + LOG_S_MAX
        while not re.search(rf"prefix={mark}\b", log := self._requests()):
            if time.monotonic() > give_up_s:
                raise radosgw.ServerError(f"{self.name}: no line for a request after {LOG_S_MAX:g} s")
            time.sleep(0.05)
        return re.findall(rf'"GET /{bucket}/({re.escape(prefix)}[^ ?]*)', log)

    def _requests(self) -> str:
        if self.name == "moto":
            return "\n".join(list(self._server.last))
        text: str = self._server.requests_path.read_text(errors="replace")
        return text

    def stop(self) -> None:
        """At once. Idempotent."""
        self._server.stop()

    def read(self, bucket: str, name: str) -> bytes:
        """Raises ServerError: it is not there, say."""
        try:
            content: bytes = self._client.get_object(Bucket=bucket, Key=name)["Body"].read()
        except (BotoCoreError, ClientError) as error:
            raise radosgw.ServerError(f"{self.name}: {bucket}/{name}: {error}") from error
        return content

    def sizes_bytes(self, bucket: str, prefix: str) -> dict[str, int]:
        """Of each object below a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def size_bytes(self, bucket: str, prefix: str) -> int:
        """Of all objects below a prefix."""
        return sum(self.sizes_bytes(bucket, prefix).values())

    def __enter__(self) -> S3:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
