"""What can go wrong in a tier, grouped by when it happens.

Opening a tier raises, because a daemon must not start on storage it cannot trust.
Moving records never raises for one bad record: reads and writes answer per
record, so that one bad sector costs one block and not a batch.
"""

from __future__ import annotations

import errno
from typing import Final


class TierError(Exception):
    """Any failure of a tier; the message names the tier, the file and what is allowed."""


class OpenError(TierError):
    """The tier's storage cannot be opened. heals: it may open later, without a change of settings."""

    heals = True


class SettingError(OpenError):
    """A setting that cannot work here; trying again is no use."""

    heals = False


# A path with one of these is a wrong setting: trying again is no use.
NEVER_HEALS: Final = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.ENOSYS),
    }
)


class NotOursError(SettingError):
    """The path holds something that this project did not write; nothing was touched."""


class VersionError(SettingError):
    """The storage was written by another format version; nothing was touched."""


class DamagedError(OpenError):
    """The storage is ours, and cannot be read any more."""


class BusyError(OpenError):
    """Another process holds this storage."""


class RecordSizeError(TierError):
    """A record is empty or larger than a slab, so no slot can hold it."""


class ObjectError(TierError):
    """A store of objects did not do what it was asked; the message names the store and the object."""


class ObjectMissing(ObjectError):
    """There is no object of this name."""


class ObjectRefused(ObjectError):
    """The store does not allow it: wrong bucket, wrong region, no permission. Trying again is no use."""


class PlaceMissing(ObjectRefused):
    """The directory of a store is not there."""


class ObjectKeyUnknown(ObjectRefused):
    """It says that it is sealed with a key that is not in the key file, or by a later version; whether that is true cannot be known."""


class ObjectUnavailable(ObjectError):
    """The store failed, or did not answer in time. It may work later."""


class ObjectDamaged(ObjectError):
    """The place answers, and what lies there is not the object: cut off, too large, or on a bad sector. It says nothing
    of the place: others of its objects are as good as ever."""


class PackDamaged(TierError):
    """The bytes are no pack, or not the pack that was asked for."""


class PackUnknown(PackDamaged):
    """A pack of a later version: nobody here can read it, and nobody here replaces or deletes it."""
