"""What can go wrong with models, grouped by when it happens.

Whatever a store of objects does wrong is an `ObjectError` of the tiers, and bytes that are not what somebody wrote are `Damaged`
of replication; both are said as they are.
"""

from __future__ import annotations


class ModelError(Exception):
    """Any failure with a model; the message says what, where, and what is allowed."""


class ModelMissing(ModelError):
    """There is no model, or no revision, of this name."""


class ModelExists(ModelError):
    """This revision is there already, with other content; nothing was changed."""


class FilesWrong(ModelError):
    """The files that should be published, or are on this node, are not a model's: cut off, changing, of a strange kind."""


class NoRoom(ModelError):
    """It does not fit where it should go; nothing was started."""


class InUse(ModelError):
    """It is pinned, or a process uses it, and stays as it is."""


class ChunkDamaged(ModelError):
    """The bytes of a chunk are not what its name says, in every place that has it."""
