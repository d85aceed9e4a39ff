"""A fault: how a node is broken and mended, and by which words the cause is known wherever somebody looks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from benchmarks.drill.node import Node


class NotHere(Exception):
    """This machine cannot do that; the message says what it lacks."""


class Cause(NamedTuple):
    """A problem as the daemon lists it. subject, says: patterns; says "" where the kind and the subject say it."""

    kind: str
    subject: str
    says: str = ""


class Fault(ABC):
    """One of them. causes: any of which names it. silent: the daemon itself answers nobody, and others say so."""

    name: ClassVar[str]
    causes: ClassVar[tuple[Cause, ...]]
    silent: ClassVar[bool] = False
    regions: ClassVar[tuple[str, ...]] = ("na",)  # the last one is the node's
    group_bytes: ClassVar[int] = 0  # limit of a cgroup that the node is in

    def prepare(self, node: Node) -> None:  # noqa: B027 most have nothing to prepare
        """Before the daemon starts: settings, file systems. Raises NotHere."""

    @abstractmethod
    def break_(self, node: Node) -> None:
        """Under traffic."""

    @abstractmethod
    def mend(self, node: Node) -> None:
        """The end of it; idempotent, also where nothing was broken."""
