"""The S3 server of the demo: radosgw where it is installed, else moto from the venv; and its buckets.

    with S3(directory) as s3:  s3.make_bucket("na")        s3.endpoint, s3.name

Its credentials are in this process's environment, where the commands that it starts find them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import boto3

from benchmarks.regions import radosgw
from tests.objects import S3Server

BUCKET_REGION = "us-east-1"


class S3:
    """A server that runs. Context manager."""

    def __init__(self, home: Path, prefer_real: bool = True) -> None:
        """home: made, for its files. Raises radosgw.ServerError."""
        home.mkdir()
        self._server: Any
        if prefer_real and radosgw.is_installed():
            self.name, self._server = "radosgw", radosgw.Radosgw(home)
            key, secret = self._server.key, self._server.secret
        else:
            self.name, self._server = "moto", S3Server()
            key, secret = "demo", "demo"  # it believes any
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

    def size_bytes(self, bucket: str, prefix: str) -> int:
        """Of all objects below a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sum(entry["Size"] for page in pages for entry in page.get("Contents", ()))

    def __enter__(self) -> S3:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
