"""Models in DRAM, as a caller may ask for them: what the engine does, in answers of the protocol.

The caller's connection is the filler, or the user: with its end both are over.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.errors import BadRequest, NotFound
from kvstore.protocol import frames
from kvstore.residency.models import Resident
from tiers.base import CHECKSUM_BYTES
from tiers.dram.owners import USERS_BASE
from tiers.locks import LOCK_BASE


def reserve_model(engine: Engine, session: Session | None, r: frames.ReserveModel) -> frames.Answer:
    """Raises BadRequest, LimitExceeded, InUse."""
    session = _attached(session)
    model = engine.models.reserve(session, r.label, r.content, r.count)
    is_filler = model.filler is session
    indexes = sorted(index for index in model.slots if index >= r.start) if is_filler else []
    return _answer(engine, model, indexes)


def commit_model(engine: Engine, session: Session | None, r: frames.CommitModel) -> frames.Answer:
    """Raises BadRequest, NotFound."""
    session, size = _attached(session), CHECKSUM_BYTES
    if len(r.checksums) != size * len(r.indexes):
        raise BadRequest(f"commit: {len(r.checksums)} bytes of checksums for {len(r.indexes)} slabs")
    checksums = [r.checksums[at : at + size] for at in range(0, len(r.checksums), size)]
    engine.models.commit(session, r.label, r.indexes, checksums)
    return frames.Done()


def attach_model(engine: Engine, session: Session | None, r: frames.AttachModel) -> frames.Answer:
    """Raises BadRequest, NotFound."""
    model = engine.models.attach(_attached(session), r.label)
    is_whole = model.state == "whole"
    return _answer(engine, model, range(r.start, model.count) if is_whole else ())


def drop_model(engine: Engine, r: frames.DropModel) -> frames.Answer:
    """Raises NotFound, InUse."""
    engine.models.drop(r.label)
    return frames.Done()


def list_models(engine: Engine) -> frames.Answer:
    slab_bytes = engine.arena.layout.slab_bytes
    held = {"capacity_bytes": engine.models.capacity_bytes, "slab_bytes": slab_bytes}
    return frames.StatusReport({"models": engine.models.status(), **held})


def model_loaded(engine: Engine, r: frames.ModelLoaded) -> frames.Answer:
    engine.models.loads.add(r.by_source.items(), r.seconds)
    return frames.Done()


def _attached(session: Session | None) -> Session:
    if session is None or session.owner < 0:
        raise BadRequest("models in DRAM: only for a connection with the arena")
    return session


def _answer(engine: Engine, model: Resident, indexes: Sequence[int]) -> frames.ModelSlabs:
    slabs = engine.arena.slabs
    if slabs is None:
        raise NotFound("models in DRAM: there is no arena")
    page = list(indexes[: frames.MODEL_SLABS_MAX])
    first = model.slots.get(0)
    return frames.ModelSlabs(
        model.state,
        model.count,
        model.content,
        page,
        bytes(index in model.ready for index in page),
        frames.Extents(slabs.layout.slab_bytes, *slabs.extents([model.slots[index] for index in page])),
        LOCK_BASE + USERS_BASE + (first >> 16) if first is not None else 0,
    )
