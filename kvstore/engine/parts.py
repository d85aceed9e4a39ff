"""What an engine is made of, for those that look at all of it: the audit and the list of queues."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.commands.clearing import Clearing
from kvstore.commands.retention_commands import Retention
from kvstore.durable.persister import Persister
from kvstore.engine.lookups import Lookups
from kvstore.engine.sessions import Session
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.index.prompts import Prompts
from kvstore.index.slots import Slots
from kvstore.io_pool import Io
from kvstore.ledger.accounts import Accounts
from kvstore.ledger.counters import Counters
from kvstore.movement.adoption import Adoption
from kvstore.movement.loading import Loader
from kvstore.movement.verification import Verifier
from kvstore.movement.watch import Watch
from kvstore.movement.writing import Writer
from kvstore.residency.levels import Nvme
from kvstore.residency.models import Models
from kvstore.residency.residency import Residency
from kvstore.steps import Background


class Parts:
    """The engine has these; see `kvstore.engine.engine`."""

    arena: Slots
    nvme: Nvme
    namespaces: NamespaceRegistry
    sessions: list[Session]
    blocks: Residency
    models: Models
    lookups: Lookups
    loader: Loader
    writer: Writer
    verifier: Verifier
    watches: Sequence[Watch]
    adoption: Adoption
    persister: Persister | None
    retention: Retention
    clearing: Clearing
    accounts: Accounts
    prompts: Prompts
    counters: Counters
    io: Io
    background: Background
