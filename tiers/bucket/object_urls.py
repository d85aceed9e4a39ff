"""URLs of stores, and the obstore behind each.

    s3://bucket/prefix   gs://bucket/prefix   az://container/prefix   file:///directory   memory://name

What is wrong with a URL or its options is one line, in which no part of it stands that might be a credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from tiers.bucket.object_failures import failure
from tiers.bucket.object_options import ObjectOptions
from tiers.errors import ObjectRefused, PlaceMissing

if TYPE_CHECKING:  # exists in obstore's stubs only
    from obstore.store import ObjectStore

# Of obstore's own client: our timeout, which knows of bytes, is over before.
OBJECT_CLIENT_TIMEOUT_S: Final = 24 * 3600

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# What other stores of S3 take is theirs to say; these two are one provider's each.
_BUCKETS: Final = {
    "gs": (re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"), "3 to 222 of a-z 0-9 . _ -"),
    "az": (re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]"), "3 to 63 of a-z 0-9 -, without --"),
}
PREFIX_CHARS_MAX: Final = 480  # names of objects have 1,024 bytes at most, of which ours take 512
WHERE_CHARS_MAX: Final = 120  # of what is wrong, in a line
_PREFIX = re.compile(r"(?!\.\.?(/|$))[A-Za-z0-9._=+-]+(/(?!\.\.?(/|$))[A-Za-z0-9._=+-]+)*")

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")

_memories: dict[str, MemoryStore] = {}  # of this process, by name


def open_store(url: str, options: ObjectOptions) -> tuple[str, ObjectStore]:
    """What people call the store, and the store. Raises ObjectRefused."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("s3", "gs", "az", "file", "memory"):
        raise ObjectRefused(
            f"{scheme[:8]}…: no URL of a store: allowed are s3://, gs://, az://, file:/// and memory://"
        )
    if "@" in rest or "?" in rest or "#" in rest:
        raise ObjectRefused(f"{scheme}://…: allowed is a place only, without user, password or parameters")
    try:
        if scheme == "file":
            return _open_directory(rest, options)
        if scheme == "memory":
            return url, _memories.setdefault(rest, MemoryStore())
        return _open_bucket(scheme, rest, options)
    except ObjectRefused:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 obstore's panics are no `Exception`
        hint = ": which account? access_key_id, or AZURE_STORAGE_ACCOUNT_NAME" if scheme == "az" else ""
        raise ObjectRefused(f"{failure(error, f'{url}: open')}{hint}") from None


def is_host_label(bucket: str) -> bool:
    """Whether a bucket of S3 can stand before its provider's host: certificates there are for one label more."""
    return re.fullmatch(_LABEL, bucket) is not None


def _open_directory(rest: str, options: ObjectOptions) -> tuple[str, ObjectStore]:
    path = unquote(rest)
    where = f"file://{path}"
    if not os.path.isabs(path):
        raise ObjectRefused(f"{where}: allowed is the absolute path of a directory, as in file:///mnt/region")
    if not options.create and not os.path.isdir(path):
        raise PlaceMissing(f"{where}: there is no such directory")
    # Folders that deletes leave empty go away: a folder is what objects have in their names, nothing else.
    return where, LocalStore(path, mkdir=options.create, automatic_cleanup=True)


def _open_bucket(scheme: str, rest: str, options: ObjectOptions) -> tuple[str, ObjectStore]:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    where = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    _check_names(scheme, where, bucket, prefix)
    _check_endpoint(where, options)
    shared: dict[str, Any] = {
        "client_options": {
            "allow_http": options.allow_http,
            "timeout": timedelta(seconds=OBJECT_CLIENT_TIMEOUT_S),
            "connect_timeout": timedelta(seconds=options.timeout_s),
        },
        # See object_store.py: retries are there.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(0)},
        "prefix": prefix or None,
    }
    kinds: dict[str, Callable[..., ObjectStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    if scheme == "gs" and (options.endpoint or options.access_key_id or options.secret_access_key):
        raise ObjectRefused(f"{where}: takes no endpoint and no key: set GOOGLE_APPLICATION_CREDENTIALS")
    settings = {"s3": _of_s3(where, bucket, options), "gs": {}, "az": _of_azure(options)}[scheme]
    given = {name: value for name, value in settings.items() if value != ""}
    return where, kinds[scheme](bucket, **shared, **given)


def _check_names(scheme: str, where: str, bucket: str, prefix: str) -> None:
    """What a store would take amiss, or for another name than it is written here. Raises ObjectRefused."""
    shown = ascii(where)[1:-1]
    shown = shown if len(shown) <= WHERE_CHARS_MAX else shown[:WHERE_CHARS_MAX] + "…"
    if not _BUCKET.fullmatch(bucket) or (prefix and not _PREFIX.fullmatch(prefix)):
        raise ObjectRefused(f"{shown}: allowed is {scheme}://bucket/prefix, of letters, digits and . _ = + -")
    is_bucket, allowed = _BUCKETS.get(scheme, (_BUCKET, ""))
    if not is_bucket.fullmatch(bucket):
        raise ObjectRefused(
            f"{shown}: its bucket: allowed are {allowed}, beginning and ending with a letter or digit"
        )
    if len(prefix) > PREFIX_CHARS_MAX:
        raise ObjectRefused(
            f"{shown}: a prefix of {len(prefix)} characters: at most {PREFIX_CHARS_MAX} are allowed"
        )
    if scheme == "az" and any(part.endswith(".") for part in prefix.split("/")):
        raise ObjectRefused(f"{shown}: no part of its prefix may end with a dot, which Azure leaves out")
    if scheme == "gs" and prefix.startswith(".well-known/acme-challenge"):
        raise ObjectRefused(f"{shown}: Google keeps .well-known/acme-challenge for itself")


def _check_endpoint(where: str, options: ObjectOptions) -> None:
    if not options.endpoint:
        return
    parts = urlsplit(options.endpoint)
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.query or not parts.hostname:
        raise ObjectRefused(f"{where}: its endpoint: allowed is https://host:port, without user or password")
    if parts.scheme == "http" and not options.allow_http:
        raise ObjectRefused(f"{where}: {options.endpoint} has no TLS: set allow_http, or use https://")


def _check_host(where: str, bucket: str, endpoint: str) -> None:
    """Whether the bucket can stand before the endpoint's host: the library below panics where the two are no name of a host."""
    host = urlsplit(endpoint).hostname or ""
    if ":" in host or host.replace(".", "").isdecimal() or not _HOST.fullmatch(f"{bucket}.{host}".lower()):
        raise ObjectRefused(
            f"{where}: path_style = off makes {bucket}.{host} the name of a host, which it cannot be: set it to on"
        )


def _of_s3(where: str, bucket: str, options: ObjectOptions) -> dict[str, Any]:
    endpoint = options.endpoint.rstrip("/")
    if endpoint and not options.path_style:
        _check_host(where, bucket, endpoint)
    if endpoint and not options.path_style:
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    return {
        "aws_endpoint_url_s3": endpoint,  # the one that nothing in the environment overrides
        "region": options.region,
        "virtual_hosted_style_request": "" if options.path_style else True,
        "access_key_id": options.access_key_id,
        "secret_access_key": options.secret_access_key,
        "session_token": options.session_token,
    }


def _of_azure(options: ObjectOptions) -> dict[str, Any]:
    return {
        "endpoint": options.endpoint,
        "account_name": options.access_key_id,
        "account_key": options.secret_access_key,
    }
