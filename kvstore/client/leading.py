"""What a lookup answers: a number of blocks, which is all that most callers want, and what is about to follow."""

from __future__ import annotations


class Leading(int):
    """How many leading blocks there are. writing: behind those, blocks that somebody is writing right now, or that are held
    behind such ones; who asks again will find them, unless their writer gives up. At most 4,096 are told."""

    writing: int = 0  # of the class: nearly always, so that an answer costs no more than its number
