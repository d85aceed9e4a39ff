"""What obstore says when something fails, as one of our errors in one clear line.

    obstore's error: 20 lines, with addresses, headers' echoes and the server's own words
      ──▶ status and code │ cause of the connection │ errno ──▶ ObjectMissing, ObjectRefused, ObjectUnavailable

Nothing is quoted but numbers and words from tables here: what a server echoes, and what stands in an address, may be a
credential. For the same reason the error that obstore raised is not chained to ours.
"""

from __future__ import annotations

import errno
import os
import re

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tiers.bucket.plain_lists import ODD_NAME
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused, ObjectUnavailable

# What a store's call raises: a wrong path is a ValueError, a missing object a FileNotFoundError.
StoreErrors = (BaseError, OSError, ValueError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_OF_A_KEY = re.compile(r"DeleteObjects request failed for key .*\(code: ([A-Za-z]{1,64})\)")
_ERRNO = re.compile(r"\(os error (\d{1,4})\)")
_NO_CREDENTIALS = re.compile(
    r"latest/api/token|latest/meta-data|security-credentials|metadata\.google\.internal|metadata/identity"
)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]{1,40})")
_CERTIFICATES = {  # what obstore says of one → what to do
    "UnknownIssuer": ": nobody here knows who issued it (SSL_CERT_FILE names a file of more certificates to trust)",
    "NotValidForName": ": it is for other names than this endpoint's",
    "Expired": ": it has expired, or the clock here is wrong",
    "NotValidYet": ": it is not valid yet, or the clock here is wrong",
}
_CAUSES = (  # words in obstore's account of a connection → what they mean; the first one counts
    ("without LOCATION", "the bucket is in another region", ObjectRefused),
    ("invalid peer certificate", "the store has a TLS certificate that is not trusted here", ObjectRefused),
    ("InvalidCertificate", "the store has a TLS certificate that is not trusted here", ObjectRefused),
    ("StartTooLarge", "the object ends before the range that was asked for", ObjectDamaged),
    ("File system loop found", "a link that leads to itself", ObjectDamaged),
    ("dns error", "the host is not known", ObjectUnavailable),
    ("ConnectionRefused", "the store cannot be reached: connection refused", ObjectUnavailable),
    ("TimedOut", "the store did not answer in time", ObjectUnavailable),
    ("kind: Connect", "the store cannot be reached", ObjectUnavailable),
    ("kind: Request", "the store broke the connection off", ObjectUnavailable),
    ("kind: Interrupted", "the store broke the connection off", ObjectUnavailable),
)
_REFUSED_TYPES = (
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
    ValueError,
)
_REFUSED_ERRNOS = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
)
_DAMAGED_ERRNOS = frozenset((errno.EIO, errno.ELOOP))  # of one file, not of its directory
_AGAIN_CODES = frozenset(  # 4xx, and trying again is of use
    (
        *("ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout"),
        *("RequestTimeTooSkewed", "ServiceUnavailable", "SlowDown"),
    )
)
_AGAIN_STATUSES = frozenset((408, 409, 412, 425, 429))
_NOT_IMPLEMENTED = 501


def failure(error: BaseException, asked: str) -> ObjectError:
    """Our error for whatever a store's call raised. asked: the store, and what it was asked for."""
    if not isinstance(error, StoreErrors):  # a panic of the library, say: its own words may hold anything
        return ObjectUnavailable(f"{asked}: the library failed ({type(error).__name__})")
    text = str(error)
    if _NO_CREDENTIALS.search(text):
        profile = "; AWS_PROFILE is set, and profiles are not read" if os.environ.get("AWS_PROFILE") else ""
        return ObjectUnavailable(
            f"{asked}: no credentials: none in the configuration or the environment, none from this machine{profile}"
        )
    status = status_of(error)
    if status:
        return _of_status(status, text, asked)
    if found := _OF_A_KEY.search(text):  # the others are deleted
        of_key = ObjectUnavailable if found[1] in _AGAIN_CODES else ObjectRefused
        return of_key(f"{asked}: the store answers {found[1]} for one of them")
    number = _ERRNO.search(text)
    if code := int(number[1]) if number else getattr(error, "errno", None):
        return _of_errno(code, error, asked)
    if isinstance(error, InvalidPathError) and ": list " in asked:
        return ObjectRefused(f"{asked}: {ODD_NAME}")
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{asked}: there is no such object")
    for words, meaning, kind in _CAUSES:
        if words in text:
            return kind(f"{asked}: {meaning}{_of_certificate(text)}")
    kind = ObjectRefused if isinstance(error, _REFUSED_TYPES) else ObjectUnavailable
    return kind(f"{asked}: failed ({type(error).__name__})")


def _of_certificate(text: str) -> str:
    found = _CERTIFICATE.search(text)
    return _CERTIFICATES.get(found[1].removesuffix("Context"), "") if found else ""


def status_of(error: BaseException) -> int:
    """The HTTP status in it; 0 without one."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def lacks_conditions(error: Exception) -> bool:
    """Whether the store says that it knows no conditional writes."""
    return status_of(error) == _NOT_IMPLEMENTED or isinstance(error, NotSupportedError)


def _of_status(status: int, text: str, asked: str) -> ObjectError:
    found = _CODE.search(text)
    code = found[1] if found else ""
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return ObjectRefused(f"{asked}: there is no such bucket")
    if status == 404:
        return ObjectMissing(f"{asked}: there is no such object")
    if status == 416:
        return ObjectDamaged(f"{asked}: the object ends before the range that was asked for")
    answer = f"{asked}: the store answers {status}{code and f' {code}'}"
    if status < 400 or code == "AuthorizationHeaderMalformed":
        return ObjectRefused(f"{answer}: is the bucket in another region?")
    is_for_good = status < 500 and status not in _AGAIN_STATUSES and code not in _AGAIN_CODES
    return ObjectRefused(answer) if is_for_good or status == _NOT_IMPLEMENTED else ObjectUnavailable(answer)


def _of_errno(number: int, error: BaseException, asked: str) -> ObjectError:
    if number == errno.ENOENT and isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{asked}: there is no such object")
    kind: type[ObjectError] = ObjectRefused if number in _REFUSED_ERRNOS else ObjectUnavailable
    if number in _DAMAGED_ERRNOS:
        kind = ObjectDamaged
    return kind(f"{asked}: {os.strerror(number)}")
