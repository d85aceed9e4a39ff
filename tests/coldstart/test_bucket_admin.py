"""Buckets beyond bytes: made, and kept free of what uploads left; against moto, by boto3 and by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest

from coldstart.fleet.bucket_admin import RULE_ID, Bucket, BucketError, State
from tests.doctor.looked import doctor, of
from tests.objects import S3Server
from tests.running import Place, kvstore
from tiers.bucket.object_options import ObjectOptions

KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "us-east-1"}
OTHERS = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 7}}
NARROW = {
    "ID": "narrow",
    "Status": "Enabled",
    "Filter": {"Prefix": "logs/"},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(s3_server: S3Server) -> Any:
    return boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")


def bucket(server: S3Server, name: str, region: str = "us-east-1") -> Bucket:
    return Bucket(
        f"s3://{name}/prefix", ObjectOptions(endpoint=server.endpoint, region=region, allow_http=True)
    )


def rules(s3: Any, name: str) -> list[str]:
    return [rule["ID"] for rule in s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]]


def test_a_bucket_is_made_once(s3_server: S3Server, s3: Any) -> None:
    """In the region that is asked for; one that is there is left as it is."""
    made = bucket(s3_server, "made", "eu-west-1")
    assert made.create() is True and made.create() is False
    assert s3.get_bucket_location(Bucket="made")["LocationConstraint"] == "eu-west-1"


def test_rules_that_are_there_stay(s3_server: S3Server, s3: Any) -> None:
    """Ours is added to them, once; one that holds for a part of the bucket is not enough."""
    s3.create_bucket(Bucket="ruled")
    s3.put_bucket_lifecycle_configuration(Bucket="ruled", LifecycleConfiguration={"Rules": [OTHERS, NARROW]})
    ruled = bucket(s3_server, "ruled")
    assert ruled.state() == State("", False)
    assert ruled.abort_leftovers() is True and ruled.abort_leftovers() is False
    assert rules(s3, "ruled") == ["theirs", "narrow", RULE_ID]
    s3.put_bucket_versioning(Bucket="ruled", VersioningConfiguration={"Status": "Enabled"})
    assert ruled.state() == State("Enabled", True) and "old versions" in ruled.state().keeps


def test_object_lock_is_seen(s3_server: S3Server, s3: Any) -> None:
    """For how long what is deleted stays; a bucket without says nothing."""
    s3.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    kept = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}}}
    s3.put_object_lock_configuration(Bucket="locked", ObjectLockConfiguration=kept)
    assert "compliance 30 days" in bucket(s3_server, "locked").state().keeps
    s3.create_bucket(Bucket="unlocked")
    assert bucket(s3_server, "unlocked").state().keeps == ""


def test_what_cannot_be_done_is_one_line(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of store, a bucket that is not there, nobody who answers, no boto3."""
    with pytest.raises(BucketError, match="allowed are buckets of S3"):
        Bucket("gs://there", ObjectOptions())
    with pytest.raises(BucketError, match="NoSuchBucket"):
        bucket(s3_server, "nosuch").abort_leftovers()
    with pytest.raises(BucketError, match="s3://away: head bucket"):
        Bucket("s3://away", ObjectOptions(endpoint="http://127.0.0.1:1", region="us-east-1")).create()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(BucketError, match=r"pip install 'kvstore-llm\[s3\]'"):
        bucket(s3_server, "there")


def regions_file(path: Path, url: str, endpoint: str = "") -> Path:
    file = path / "regions.toml"
    file.write_text(
        f'deployment = "acme"\n[regions.na]\nurl = "{url}"\n'
        + (f'endpoint = "{endpoint}"\n' if endpoint else "")
    )
    return file


def init(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return kvstore("region", "init", "na", "--regions", file, *words, **KEYS)


def test_region_init_makes_its_bucket(s3_server: S3Server, s3: Any, tmp_path: Path, place: Place) -> None:
    """Without --create a missing bucket is an error; with it the bucket, its rule and the region are there, and the doctor is content
    until the bucket keeps versions."""
    file = regions_file(tmp_path, "s3://fresh/kv", s3_server.endpoint)
    assert init(file).returncode != 0
    done = init(file, "--create", "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["bucket_made"] and document["rule_made"] and document["region"] == "na"
    again = init(file, "--create")
    assert again.returncode == 0 and "its bucket was there" in again.stdout
    assert rules(s3, "fresh") == [RULE_ID]

    words = (
        *place.arguments[:2],
        "--set=dram.capacity_bytes=16MiB",
        "--set=dram.slab_bytes=4MiB",
        f"--set=regions_file={file}",
    )
    assert not of(doctor(*words, "--set=region=na", code=0, **KEYS), "bucket leftovers")
    s3.put_bucket_versioning(Bucket="fresh", VersioningConfiguration={"Status": "Enabled"})
    s3.delete_bucket_lifecycle(Bucket="fresh")
    found = doctor(*words, "--set=region=na", code=0, **KEYS)
    assert of(found, "bucket leftovers", "note") and of(found, "bucket versions", "warning")


def test_create_is_for_buckets_of_s3(tmp_path: Path) -> None:
    """A directory is refused in one line, and so is --create of anything but init."""
    (tmp_path / "na").mkdir()
    file = regions_file(tmp_path, f"file://{tmp_path}/na")
    ended = init(file, "--create")
    assert (
        ended.returncode == 1
        and "allowed are buckets of S3" in ended.stderr
        and len(ended.stderr.splitlines()) == 1
    )
    listed = kvstore("region", "ls", "--create", "--regions", file)
    assert listed.returncode == 2 and "--create" in listed.stderr
