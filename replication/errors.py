"""What can go wrong in a region, grouped by when it happens.

Opening: RegionError, MarkerDamaged, CatalogueBusy. Reading: Damaged, FormatUnknown. Writing: WriterConflict, IntentLost, ModelRemoved, ModelDiffers. At any time: CatalogueDamaged, after
which the catalogue is made anew, and CatalogueUnwritable, after which it is not. What the store of objects itself does wrong is an `ObjectError` of the tiers.
"""

from __future__ import annotations


class ReplicationError(Exception):
    """Any failure of a region; the message names the place, what is there and what is allowed."""


class RegionError(ReplicationError):
    """This place is not the region that was asked for; nothing was written."""


class MarkerDamaged(ReplicationError):
    """What lies where the marker of a region should be is none: nobody knows which region this is, and it may be mended."""


class CatalogueBusy(ReplicationError):
    """Another process has this catalogue open."""


class CatalogueDamaged(ReplicationError):
    """The catalogue cannot be read or written. It is a copy, and can be made again from the region."""


class CatalogueUnwritable(CatalogueDamaged):
    """Its disk is full, or its files are not for this process: what is there is well, and stays. It is tried again."""


class Damaged(ReplicationError):
    """The bytes of an object are not what a writer of the region put there."""


class FormatUnknown(Damaged):
    """A later version has written the object: nobody here can say what it says, and nobody here replaces or deletes it."""


class ModelRemoved(ReplicationError):
    """This revision was removed, and may not come back yet."""


class ModelDiffers(ReplicationError):
    """Another content is there under the name of this revision; it stays."""


class IntentLost(ReplicationError):
    """What was put may have been collected as garbage meanwhile: it has to be begun again."""


class WriterConflict(ReplicationError):
    """Somebody else writes segments under the id of this writer: a data directory was copied."""
