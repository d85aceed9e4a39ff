"""The words that may leave this machine in a bundle: those of our own sources, of the system's errors, and figures.

    our rooms: kvstore/, coldstart/ … (sources, as installed)        ─┐
    what errno, signals, exceptions and stores call their errors     ─┼─▶ vocabulary(): some ten thousand words
                                                                      │   in lower case
    12, 3.5MiB, 0x1f, 2026-11-25T10:00:00Z                           ─┴─▶ is_figure()

A message of ours is made of words of our sources, so it stays readable whatever it says next year; no list has to be kept.
A word is what stands between blanks and marks; a hyphen or a dot inside belongs to it, so that parts of a passphrase are not
looked up one by one.
"""

from __future__ import annotations

import errno
import http
import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

WORD = re.compile(r"[^\W_](?:[\w.-]*[^\W_])?")
ROOMS = ("kvstore", "coldstart", "tiers", "replication", "connectors")
_FIGURE = re.compile(
    r"\d{1,15}(?:\.\d{1,9})?(?:[KMGT]i?B|B|[munp]?s|ms|us|ns|min|h|d|kB|x)?"  # 12, 3.5MiB
    r"|0x[0-9a-f]{1,4}"
    r"|\d{4}-\d\d-\d\dT?(?:\d\d)?|\d\d\.\d{1,9}Z?|\d{1,2}Z"  # 2026-11-25T10, the parts of a time between colons
    r"|\d{1,3}(?:\.\d{1,4}){1,3}"  # 1.2.3
)
_OF_STORES = (
    "AccessDenied AuthorizationHeaderMalformed BadDigest BucketAlreadyExists ConditionalRequestConflict EntityTooLarge ExpiredToken "
    "InternalError InvalidAccessKeyId InvalidArgument InvalidRange InvalidRequest InvalidToken MalformedXML MethodNotAllowed "
    "NoSuchBucket NoSuchKey NotImplemented OperationAborted PermanentRedirect PreconditionFailed QuotaExceeded RequestTimeout "
    "RequestTimeTooSkewed ServiceUnavailable SignatureDoesNotMatch SlowDown TemporaryRedirect TooManyRequests UnknownIssuer "
    "http https s3 gs az file memory unix tcp postgres mysql redis ipc x-api-key api-key "
    "ext4 xfs btrfs tmpfs overlay proc sysfs cgroup cgroup2 hugetlbfs devtmpfs devpts mqueue nfs nfs4 fuse rw ro relatime noatime "
    "nosuid nodev noexec dev sys var lib run mnt data home root etc usr opt srv tmp shm init.scope system.slice user.slice kvstore.service"
)


@cache
def vocabulary() -> frozenset[str]:
    """All of them, in lower case. Reads our sources once: half a second."""
    words = set(words_in(_OF_STORES))
    for room in ROOMS:
        root = Path(str(import_module(room).__file__)).parent
        for path in root.rglob("*.py"):
            words.update(words_in(path.read_text(encoding="utf-8", errors="replace")))
    for text in _of_the_system():
        words.update(words_in(text))
    return frozenset(words)


def _of_the_system() -> Iterator[str]:
    for number, name in errno.errorcode.items():
        yield f"{name} {os.strerror(number)}"
    yield from (one.name for one in signal.Signals)
    yield from (f"{one.name} {one.phrase}" for one in http.HTTPStatus)
    yield from (name for name in dir(__builtins__) if name.endswith(("Error", "Exception", "Warning")))


def words_in(text: str) -> Iterator[str]:
    """Its words, in lower case."""
    return (word.lower() for word in WORD.findall(text))


def is_figure(word: str) -> bool:
    """A number with its unit, a time, a version: no secret that is worth the name is one."""
    return _FIGURE.fullmatch(word) is not None
