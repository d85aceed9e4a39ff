"""What a bucket needs beyond bytes: that it is there, that halves of uploads go by themselves, whether old versions stay. By boto3.

Uploads in parts that were cut off are seen by nobody, and paid for: a lifecycle rule has the store abort them. Rules that are there
stay: a store takes all of them at once, so they are read first, and ours is added. A bucket with versions keeps what is deleted: that is
said, for others may want it so; what is erased goes (old_versions.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from coldstart.errors import ModelError
from tiers.bucket.object_options import ObjectOptions

LEFTOVER_DAYS: Final = 2  # longer than any upload of ours takes
RULE_ID: Final = "kvstore-abort-multipart-leftovers"
_ASK_S: Final = 10.0
_NO_RULES: Final = "NoSuchLifecycleConfiguration"
_GONE: Final = ("404", "NoSuchBucket", "NotFound")
_HERE: Final = "us-east-1"  # the region that no bucket is told


class BucketError(ModelError):
    """A bucket cannot be looked after: no boto3, no rights, no answer, or no such thing at this store."""


class State(NamedTuple):
    """versions: "Enabled", "Suspended", or "" where there never were any. aborts_leftovers: None where the store has no such rules. lock: for how
    long no version can be deleted, in words; "" for no object lock."""

    versions: str
    aborts_leftovers: bool | None
    lock: str = ""

    @property
    def keeps(self) -> str:
        """What stays in it though it is deleted, in words; "" for nothing."""
        if self.lock:
            return f"it has object lock ({self.lock}): what is deleted stays in it until then"
        return "it keeps old versions: what is deleted stays in it" if self.versions else ""


class Version(NamedTuple):
    """Of an object. name: below the prefix of the bucket's URL."""

    name: str
    id: str


class Bucket:
    """One of S3. Every call blocks for seconds at most, and raises BucketError."""

    def __init__(self, url: str, options: ObjectOptions) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3":
            raise BucketError(f"{url}: allowed are buckets of S3 (s3://…)")
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise BucketError("boto3 is not installed: pip install 'kvstore-llm[s3]'") from error
        self.where, self._name = f"s3://{parts.netloc}", parts.netloc
        self._prefix = f"{path}/" if (path := parts.path.strip("/")) else ""
        self._failures, self._client_error = (BotoCoreError, ClientError), ClientError
        style = {"addressing_style": "path" if options.path_style else "auto"}
        config = Config(
            connect_timeout=_ASK_S, read_timeout=_ASK_S, retries={"total_max_attempts": 2}, s3=style
        )
        try:
            self._s3: Any = boto3.client(
                "s3", endpoint_url=options.endpoint or None, region_name=options.region or None, config=config
            )
        except (BotoCoreError, ValueError) as error:
            raise BucketError(f"{self.where}: {error}") from error

    def create(self) -> bool:
        """Make it, unless it is there and ours to use; whether it was made."""
        if self._asked("head_bucket", _GONE) is not None:
            return False
        region = self._s3.meta.region_name or _HERE
        where = {} if region == _HERE else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        return self._asked("create_bucket", ("BucketAlreadyOwnedByYou",), **where) is not None

    def abort_leftovers(self) -> bool:
        """Have the rule, beside those that are there; whether it is new."""
        rules = self._rules()
        if any(map(_aborts, rules)):
            return False
        ours = {
            "ID": RULE_ID,
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": LEFTOVER_DAYS},
        }
        self._asked("put_bucket_lifecycle_configuration", LifecycleConfiguration={"Rules": [*rules, ours]})
        return True

    def state(self) -> State:
        versions = self._asked("get_bucket_versioning", ("NotImplemented",)) or {}
        try:
            aborts: bool | None = any(map(_aborts, self._rules()))
        except BucketError:
            aborts = None
        return State(str(versions.get("Status", "")), aborts, self._lock())

    def folders(self, prefix: str) -> list[str]:
        """What is below a folder ("a/"), or was."""
        pages = self._versions(prefix, Delimiter="/")
        found = [one["Prefix"] for page in pages for one in page.get("CommonPrefixes", ())]
        return [name.removeprefix(self._prefix + prefix).rstrip("/") for name in found]

    def old_versions(self, prefix: str) -> Iterator[Version]:
        """Of all objects below a folder that are deleted. A list begins with the newest version of each."""
        gone = set[str]()
        for page in self._versions(prefix):
            gone |= {marker["Key"] for marker in page.get("DeleteMarkers", ()) if marker["IsLatest"]}
            for one in page.get("Versions", ()):
                if one["Key"] in gone:
                    yield Version(one["Key"].removeprefix(self._prefix), one["VersionId"])

    def read(self, version: Version, size_bytes: int) -> bytes:
        """So many of its first bytes, or all."""
        ranged: dict[str, Any] = {"VersionId": version.id, "Range": f"bytes=0-{size_bytes - 1}"}
        answer = self._asked("get_object", Key=self._prefix + version.name, **ranged) or {}
        try:
            return bytes(answer["Body"].read())
        except self._failures as error:
            raise BucketError(f"{self.where}: {version.name}: {error}") from error

    def delete(self, versions: Sequence[Version]) -> list[str]:
        """A thousand at most. Why each that is left is."""
        named = [{"Key": self._prefix + one.name, "VersionId": one.id} for one in versions]
        try:
            answer = self._asked("delete_objects", Delete={"Objects": named, "Quiet": True}) or {}
        except BucketError as error:
            return [str(error)] * len(versions)
        return [f"{one.get('Code', '')} {one.get('Message', '')}".strip() for one in answer.get("Errors", ())]

    def _versions(self, prefix: str, **words: Any) -> Iterator[dict[str, Any]]:
        """Pages of a list of all versions."""
        after: dict[str, Any] = {}
        while True:
            page = self._asked("list_object_versions", Prefix=self._prefix + prefix, **words, **after) or {}
            yield page
            if not page.get("IsTruncated"):
                return
            marks = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
            after = {name: page[theirs] for name, theirs in marks.items() if page.get(theirs)}

    def _lock(self) -> str:
        fine = ("ObjectLockConfigurationNotFoundError", "NotImplemented", "MethodNotAllowed")
        found = (self._asked("get_object_lock_configuration", fine) or {}).get("ObjectLockConfiguration", {})
        if found.get("ObjectLockEnabled") != "Enabled":
            return ""
        kept = found.get("Rule", {}).get("DefaultRetention", {})
        spans = [f"{kept[unit]} {unit.lower()}" for unit in ("Days", "Years") if unit in kept]
        return " ".join([kept["Mode"].lower(), *spans]) if spans else "of single objects"

    def _rules(self) -> list[dict[str, Any]]:
        found = self._asked("get_bucket_lifecycle_configuration", (_NO_RULES,))
        return list(found.get("Rules", ())) if found else []

    def _asked(self, call: str, fine: tuple[str, ...] = (), **words: Any) -> dict[str, Any] | None:
        """The answer; None where the store refuses with one of these codes."""
        try:
            answer: dict[str, Any] = getattr(self._s3, call)(Bucket=self._name, **words)
        except self._failures as error:
            if isinstance(error, self._client_error) and _code(error) in fine:
                return None
            raise BucketError(f"{self.where}: {call.replace('_', ' ')}: {error}") from error
        return answer


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _aborts(rule: dict[str, Any]) -> bool:
    """For all of the bucket."""
    prefix = rule.get("Prefix", rule.get("Filter", {}).get("Prefix", ""))
    is_narrow = bool(prefix or set(rule.get("Filter", {})) - {"Prefix"})
    return rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule and not is_narrow
