"""Lists a bucket of S3 in which something has a name that obstore cannot take.

obstore's list ends at the first key with an empty part ("a//b", of an upload with one "/" too many), "." or ".." as a part, or a control
character, and hands out nothing of its page. boto3 takes any key; it is asked from that page on, where it is installed.

Blocks on the network: call it from a thread. Raises ObjectError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.objects import ObjectInfo
from tiers.errors import ObjectRefused, ObjectUnavailable

ODD_NAME = "a name there can be none of ours (an empty part as in a//b, '.', '..', or a control character): remove it"


def listed(where: str, options: ObjectOptions, prefix: str, after: str) -> Sequence[ObjectInfo]:
    """The first objects whose names begin with `prefix`, behind the name `after`."""
    root = _root(where)
    found = _asked(where, options, prefix, {"StartAfter": root + after} if after else {}).get("Contents", ())
    return [
        ObjectInfo(one["Key"][len(root) :], one["Size"], one.get("ETag", ""), one["LastModified"].timestamp())
        for one in found
    ]


def folders(where: str, options: ObjectOptions, prefix: str) -> list[str]:
    """Right below `prefix`, in order."""
    found, more = list[str](), {"Delimiter": "/"}
    while True:
        answer = _asked(where, options, prefix, more)
        found += (one["Prefix"][len(_root(where) + prefix) : -1] for one in answer.get("CommonPrefixes", ()))
        if not answer.get("IsTruncated"):
            return sorted(found)
        more["ContinuationToken"] = answer["NextContinuationToken"]


def _root(where: str) -> str:
    return f"{path}/" if (path := urlsplit(where).path.strip("/")) else ""


def _asked(where: str, options: ObjectOptions, prefix: str, more: Mapping[str, str]) -> Any:
    try:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket = urlsplit(where).netloc
        return _client(options).list_objects_v2(Bucket=bucket, Prefix=_root(where) + prefix, **more)
    except ImportError:
        raise ObjectRefused(f"{where}: {prefix}: {ODD_NAME}, or pip install 'kvstore-llm[s3]'") from None
    except (BotoCoreError, ClientError, ValueError) as error:  # its words may hold anything
        status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = ObjectRefused if status in (401, 403, 404) else ObjectUnavailable
        raise kind(f"{where}: list {prefix}: failed ({type(error).__name__} {status})") from None


@lru_cache(maxsize=64)
def _client(options: ObjectOptions) -> Any:
    import boto3
    from botocore.config import Config

    given = {"endpoint_url": options.endpoint, "region_name": options.region}
    for name in ("access_key_id", "secret_access_key", "session_token"):
        given[f"aws_{name}"] = getattr(options, name)
    style = {"addressing_style": "path" if options.path_style else "auto"}
    config = Config(
        connect_timeout=options.timeout_s, read_timeout=options.timeout_s, retries={"total_max_attempts": 1}, s3=style
    )  # fmt: skip
    return boto3.client("s3", config=config, **{name: value for name, value in given.items() if value})
