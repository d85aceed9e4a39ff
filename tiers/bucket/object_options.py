"""What a store of objects is opened with, apart from its URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tiers.constants import OBJECT_TIMEOUT_S

# Of a store that works: the time for an attempt's bytes, with all that is under way.
OBJECT_LEAST_BYTES_PER_S: Final = 4e6
OBJECT_DEADLINE_S: Final = 60.0  # for one call, all attempts and pauses included
OBJECT_RETRIES_MAX: Final = 4
OBJECT_BACKOFF_S_MIN: Final = 0.1  # the longest first pause; doubles from one to the next
OBJECT_BACKOFF_S_MAX: Final = 5.0
assert OBJECT_TIMEOUT_S <= OBJECT_DEADLINE_S and OBJECT_BACKOFF_S_MIN <= OBJECT_BACKOFF_S_MAX


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """Empty: as obstore finds it in the environment, or by its default.

    endpoint: "https://host:port" of a store that is not its provider's own. region: of an S3 bucket. path_style:
    buckets stand in the path of an address, not in its host. allow_http: without TLS. The key and its secret: for az:// the
    account's name and key; gs:// takes none. create: make the directory of a file:// that is not there.

    timeout_s: for one attempt, until its last byte. deadline_s: for a whole call. Both besides the time that bytes take at
    least_bytes_per_s. A pause after attempt n is drawn from
    0 to backoff_s_min * 2**n, at most backoff_s_max.
    """

    endpoint: str = ""
    region: str = ""
    path_style: bool = True
    allow_http: bool = False
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    create: bool = False
    timeout_s: float = OBJECT_TIMEOUT_S
    deadline_s: float = OBJECT_DEADLINE_S
    least_bytes_per_s: float = OBJECT_LEAST_BYTES_PER_S
    retries_max: int = OBJECT_RETRIES_MAX
    backoff_s_min: float = OBJECT_BACKOFF_S_MIN
    backoff_s_max: float = OBJECT_BACKOFF_S_MAX
