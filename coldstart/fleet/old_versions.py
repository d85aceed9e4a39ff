"""Old versions of packs that were erased: deleted where the bucket lets us, told where it does not. By boto3, of buckets of S3.

    packs/<namespace>/ ─▶ versions of packs that are deleted ─▶ whose? a header says it ─▶ named by a tombstone: deleted, each by its id

All that was deleted of a namespace goes, also where only prefixes of it are erased: nobody reads an old version of a pack. What marks
a pack as deleted stays, for without it an older version would be there again.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from coldstart.fleet.bucket_admin import Bucket, BucketError
from replication.erasure.strays import HEADERS_TRIED_MAX
from replication.formats.tombstones import Tombstone
from tiers.bucket.objects import Objects
from tiers.errors import ObjectRefused, PackDamaged
from tiers.packs.packs import PACK_HEADER_BYTES_MAX, PACKS, PRELUDE_BYTES, parse

DELETED_TOGETHER: Final = 1000  # as many as S3 takes


def delete_old(bucket: Bucket, objects: Objects, tombstone: Tombstone) -> str:
    """What stays in a bucket of what was deleted and this names, and why, in words; "" for nothing. objects: the same bucket, whose
    seals its packs have. Blocks. Raises BucketError."""
    left, why = 0, ""
    for folder in bucket.folders(PACKS):
        try:
            digest = bytes.fromhex(folder)
        except ValueError:
            continue
        if tombstone.namespaces and digest not in tombstone.namespaces:
            continue
        is_named = not tombstone.tenant or _is_named(bucket, objects, tombstone, folder)
        if is_named is False:
            continue
        versions = bucket.old_versions(f"{PACKS}{folder}/")
        while some := list(islice(versions, DELETED_TOGETHER)):
            failed = (
                ["nobody can say whose they are"] * len(some) if is_named is None else bucket.delete(some)
            )
            left, why = left + len(failed), why or (failed[0] if failed else "")
    return f"{left} old versions cannot be deleted: {why}" if left else ""


def _is_named(bucket: Bucket, objects: Objects, tombstone: Tombstone, folder: str) -> bool | None:
    """Whether a namespace is, as the header of one of its old versions says; None where none can be read."""
    for version in islice(bucket.old_versions(f"{PACKS}{folder}/"), HEADERS_TRIED_MAX):
        try:
            first = bucket.read(version, PRELUDE_BYTES + PACK_HEADER_BYTES_MAX)
            return tombstone.names(parse(first, version.name, objects.seals).header.spec)
        except (BucketError, ObjectRefused, PackDamaged):
            continue
    return None
