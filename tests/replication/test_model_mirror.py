"""Models and mirrors: what is copied, when it is announced, and what becomes of what is damaged, gone, removed or another one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from replication.erasure.removed_models import Removal, put_removal
from replication.errors import ModelRemoved
from replication.feed.announcing import announce_models
from replication.feed.tail import POLL_INTERVAL_S
from replication.formats.announced_models import AnnouncedModel
from replication.formats.manifests import CHUNKS, PUBLISHING, decode
from replication.formats.mirror_state import MirrorState, judged, read_mirrors
from replication.formats.rules import Rule
from replication.formats.segment import FEED, segment_number
from replication.formats.segment import decode as decode_segment
from replication.mirror.copying import COPY_BACKOFF_S_MAX, DAMAGED_BACKOFF_S_MAX, LOST_AFTER_S
from replication.mirror.pull import SWEEP_INTERVAL_S
from replication.models.collecting import COLLECTING, LOCK_FORMAT, Intent, Lock, intent_name
from replication.models.copy_model import ModelCopy
from replication.store_clock import StoreClock
from tests.objects import flip
from tests.replication.mirrored import SOON_S, Bucket, World, in_memory, pack, simulate
from tests.replication.models import MadeModel, make_model, publish, put_model
from tiers.errors import ObjectUnavailable

assert in_memory  # a fixture of both


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of waits for collections, too."""
    monkeypatch.setattr("replication.models.collecting.boot_s", lambda: asyncio.get_running_loop().time())


WEIGHTS = Rule(of_weights=True)
Main = Callable[[World], Coroutine[Any, Any, None]]


def announced(bucket: Bucket) -> list[AnnouncedModel]:
    found: list[AnnouncedModel] = []
    for name in sorted(name for name in bucket.objects.stored if name.startswith(FEED)):
        writer = name[len(FEED) :].partition("/")[0]
        found += decode_segment(bucket.objects.stored[name], writer, segment_number(name)).models
    return found


def has(bucket: Bucket, *made: MadeModel) -> bool:
    return all(
        bucket.objects.stored.get(name) == content for one in made for name, content in one.objects.items()
    )


async def state_of(world: World) -> MirrorState:
    [state] = await read_mirrors(world.eu.objects)
    return state


def removal(made: MadeModel, world: World, days: float = 30.0) -> Removal:
    manifest = made.manifest
    return Removal(manifest.model, manifest.revision, world.clock(), "me", int(world.clock() + days * 86400))


def test_what_is_published_is_soon_in_the_other_region() -> None:
    """Models that were there before and later ones are copied byte by byte, and announced with their origin, once; the source
    is not written to; no intent is left, and the state says all of it."""

    async def main(world: World) -> None:
        old, new = make_model("old"), make_model("new", chunks=20)
        await publish(world.na.objects, old, clock=world.clock)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, old)
        await publish(world.na.objects, new, clock=world.clock)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, old, new)
        await asyncio.sleep(2 * SWEEP_INTERVAL_S)
        assert announced(world.eu) == [
            msgspec.structs.replace(one.announced, origin="na") for one in (old, new)
        ]
        assert not world.na.way.requests["put"] and not world.na.way.requests["delete"]
        assert not [name for name in world.eu.objects.stored if name.startswith(PUBLISHING)]
        state = await state_of(world)
        assert (state.copied_models, state.copied_model_bytes) == (2, 2300)
        assert (state.pending, state.models, state.model_left_bytes, state.failed) == (0, 0, 0, 0)
        assert list(state.watermark.values()) == [1, 1] and judged(state, world.clock()) == "ok"

    simulate(main)


def test_models_need_a_rule_of_their_own() -> None:
    """A rule of KV brings no weights and one of weights no KV; patterns and skips decide by name; caches go with their model."""

    async def main(world: World) -> None:
        wanted, other, secret = make_model("qwen3-8b"), make_model("llama"), make_model("qwen3-secret")
        caches = make_model("qwen3-8b", seed="caches", about={"vllm": "0.32"})
        kv = pack("kv", model="qwen3-8b")
        await publish(world.na.objects, wanted, other, secret, caches, clock=world.clock)
        await world.na.make(kv)
        await world.mirror(
            Rule(models=("*secret",), copies=False, of_weights=True),
            Rule(models=("qwen3*",), of_weights=True),
        )
        await asyncio.sleep(SOON_S)
        assert {one.name for one in announced(world.eu)} == {wanted.name, caches.name}
        assert not world.eu.copies() and not has(world.eu, other) and not has(world.eu, secret)
        state = await state_of(world)
        assert state.watermark == state.read and not state.pending

    simulate(main)
    assert not Rule().fits_weights("na", "eu", "m") and WEIGHTS.fits_weights("na", "eu", "m")


def test_only_what_home_lacks_is_copied() -> None:
    """Chunks that another revision brought are not fetched again; copies of copies are nobody's."""

    async def main(world: World) -> None:
        one = make_model(revision="1", chunks=20)
        shared = make_model(revision="2", seed="new", chunks=1)
        both = MadeModel(
            msgspec.structs.replace(
                one.manifest, revision="2", chunks=[*one.manifest.chunks, *shared.manifest.chunks]
            ),
            {**one.chunks, **shared.chunks},
        )
        await publish(world.na.objects, one, clock=world.clock)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        before = world.na.way.requests["get"]
        await publish(world.na.objects, both, clock=world.clock)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, one, both)
        state = await state_of(world)
        assert state.copied_model_bytes == 2100 and state.copied_models == 2
        assert world.na.way.requests["get"] - before < 20
        foreign = make_model("foreign")
        await put_model(world.na.objects, foreign)
        copy = msgspec.structs.replace(foreign.announced, origin="apac")
        await announce_models(world.na.objects, [copy], world.clock, random.Random())
        await asyncio.sleep(SOON_S + SWEEP_INTERVAL_S)
        assert not has(world.eu, foreign)

    simulate(main)


def test_a_flipped_chunk_is_never_announced_at_home() -> None:
    """The others are copied, the state names it, the watermark stands; when it is right again the model follows."""

    async def main(world: World) -> None:
        bad, good = make_model("bad", chunks=5), make_model("good")
        await publish(world.na.objects, bad, good, clock=world.clock)
        name = list(bad.chunks)[2]
        world.na.objects.stored[name] = flip(bad.chunks[name], 7)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert [one.name for one in announced(world.eu)] == [good.name]
        assert sum(chunk in world.eu.objects.stored for chunk in bad.chunks) == 4
        assert bad.name not in world.eu.objects.stored and name not in world.eu.objects.stored
        state = await state_of(world)
        assert (state.pending, state.failed, state.models, state.model_left_bytes) == (1, 1, 1, 100)
        assert state.failures[0].pack == "bad@r" and name in state.failures[0].reason
        assert judged(state, world.clock()) == "failed" and not state.watermark
        world.na.objects.stored[name] = bad.chunks[name]
        await asyncio.sleep(2 * DAMAGED_BACKOFF_S_MAX)
        assert has(world.eu, bad, good) and len(announced(world.eu)) == 2

    simulate(main)


def test_a_chunk_that_is_gone_and_one_of_another_size_are_damage() -> None:
    """Neither brings a manifest to the other region."""

    async def main(world: World) -> None:
        gone, short = make_model("gone"), make_model("short")
        await publish(world.na.objects, gone, short, clock=world.clock)
        await world.na.objects.delete([next(iter(gone.chunks))])
        name = next(iter(short.chunks))
        world.na.objects.stored[name] = short.chunks[name][:3]
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert not announced(world.eu) and (await state_of(world)).failed == 2
        assert not {gone.name, short.name} & world.eu.objects.stored.keys()

    simulate(main)


def test_an_announced_manifest_that_is_gone_is_lost() -> None:
    """After an hour, if the place itself is there; the watermark passes it, and it is told."""

    async def main(world: World) -> None:
        gone, good = make_model("gone"), make_model("good")
        await publish(world.na.objects, gone, good, clock=world.clock)
        await world.na.objects.delete([gone.name])
        await world.mirror(WEIGHTS)
        await asyncio.sleep(LOST_AFTER_S / 2)
        assert has(world.eu, good) and (await state_of(world)).pending == 1
        await asyncio.sleep(LOST_AFTER_S)
        state = await state_of(world)
        assert (state.pending, state.lost, state.lost_packs) == (0, 1, ["gone@r"])
        assert state.watermark == state.read

    simulate(main)


def test_another_content_of_a_name_stays() -> None:
    """Two regions that published one name keep theirs, and each is told of the other: nobody's is lost."""

    async def main(world: World) -> None:
        ours, theirs = make_model(seed="ours", published_by="anna"), make_model(seed="theirs")
        await publish(world.eu.objects, ours, clock=world.clock)
        await publish(world.na.objects, theirs, clock=world.clock)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, ours) and has(world.na, theirs)
        state = await state_of(world)
        assert state.failed == 1 and "published by anna" in state.failures[0].reason

    simulate(main)


def test_the_same_content_published_in_both_regions_is_one_model() -> None:
    """However it was cut and whoever published it: nothing is copied."""

    async def main(world: World) -> None:
        ours, theirs = make_model(published_by="anna"), make_model(published_by="ben")
        await publish(world.eu.objects, ours, clock=world.clock)
        await publish(world.na.objects, theirs, clock=world.clock)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        state = await state_of(world)
        assert has(world.eu, ours) and (state.pending, state.copied_model_bytes) == (0, 0)

    simulate(main)


def test_what_was_removed_is_not_copied_and_does_not_come_back() -> None:
    """Removed at the source, it leaves home within minutes; removed at home, no mirror brings it; other revisions stay."""

    async def main(world: World) -> None:
        there, here, stays = (make_model(revision=revision) for revision in ("1", "2", "3"))
        await put_removal(world.eu.objects, removal(here, world))
        await publish(world.na.objects, there, here, stays, clock=world.clock)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, there, stays) and here.name not in world.eu.objects.stored
        await put_removal(world.na.objects, removal(there, world))
        await asyncio.sleep(3 * SWEEP_INTERVAL_S)
        assert {there.name, here.name} & world.eu.objects.stored.keys() == set() and has(world.eu, stays)
        state = await state_of(world)
        assert (state.pending, state.failed) == (0, 0) and state.watermark == state.read

    simulate(main)


@pytest.mark.parametrize("at_home", [False, True])
def test_removed_while_a_mirror_copies_it(at_home: bool) -> None:
    """Whichever instant it is, there is no manifest of it in the end, and nothing is announced after it."""

    async def main(world: World) -> None:
        for number in range(12):
            made = make_model(f"m{number}", chunks=4)
            await publish(world.na.objects, made, clock=world.clock)
            world.eu.way.faults.delay_s = world.na.way.faults.delay_s = 1.0
            if not number:
                await world.mirror(WEIGHTS)
            await asyncio.sleep(2.0 * number)
            bucket = world.eu if at_home else world.na
            await put_removal(bucket.objects, removal(made, world))
            await asyncio.sleep(300.0)
            assert made.name not in world.eu.objects.stored, number

    simulate(main)


def test_two_mirrors_of_one_region_do_not_disturb_each_other() -> None:
    """Both copy the same model at once: it is there once, whole, whoever was first."""

    async def main(world: World) -> None:
        made = make_model(chunks=30)
        await publish(world.na.objects, made, clock=world.clock)
        world.eu.way.faults.delay_s = 0.5
        await world.mirror(WEIGHTS)
        await world.mirror(WEIGHTS)
        await asyncio.sleep(5 * SOON_S)
        assert has(world.eu, made) and {one.name for one in announced(world.eu)} == {made.name}

    simulate(main)


def test_a_mirror_that_is_killed_goes_on_where_it_was() -> None:
    """Chunks that were put are not fetched again, and an intent that was left stands for the next attempt, too."""

    async def main(world: World) -> None:
        made = make_model(chunks=120)
        await publish(world.na.objects, made, clock=world.clock)
        world.eu.way.faults.delay_s = 1.0

        def there() -> int:
            return sum(name.startswith(CHUNKS) for name in world.eu.objects.stored)

        for _ in range(4):
            before = there()
            await world.mirror(WEIGHTS)
            while there() < before + 12:
                await asyncio.sleep(0.3)
            await world.stop()
            assert made.name not in world.eu.objects.stored
            assert len([name for name in world.eu.objects.stored if name.startswith(PUBLISHING)]) <= 1
        await world.mirror(WEIGHTS)
        await asyncio.sleep(200.0)
        assert has(world.eu, made)
        news = 1.3 * world.loop.time() / POLL_INTERVAL_S
        assert world.na.way.requests["get"] <= 120 + 4 * 8 + 60 + news
        assert not [name for name in world.eu.objects.stored if name.startswith(PUBLISHING)]

    simulate(main)


def test_an_intent_that_outlived_its_manifest_is_removed() -> None:
    """A mirror was killed when it had put a manifest, and before it could remove its intent: the next attempt does."""

    async def main(world: World) -> None:
        made = make_model()
        await publish(world.na.objects, made, clock=world.clock)
        copy = ModelCopy(world.na.objects, world.eu.objects, made.announced, "a mirror", world.clock)
        await copy.run()
        await Intent(world.eu.objects, made.manifest, "a mirror").put()
        await Intent(world.eu.objects, made.manifest, "another one").put()
        await copy.run()
        [left] = [name for name in world.eu.objects.stored if name.startswith(PUBLISHING)]
        assert left == intent_name(made.manifest, "another one")

    simulate(main)


def test_a_removal_is_in_force_while_nobody_knows_the_time() -> None:
    """A mirror's clock is a year ahead and the store was not asked yet: nothing is copied that was removed."""

    async def main(world: World) -> None:
        made = make_model()
        await publish(world.na.objects, made, clock=world.clock)
        manifest, until_s = made.manifest, int(world.clock()) + 3600
        await put_removal(world.eu.objects, Removal(manifest.model, manifest.revision, 1, "a test", until_s))
        clock = StoreClock(lambda: world.clock() + 365 * 24 * 3600.0)
        copy = ModelCopy(world.na.objects, world.eu.objects, made.announced, "a mirror", clock)
        with pytest.raises(ModelRemoved):
            await copy.run()
        assert manifest.name not in world.eu.objects.stored

    simulate(main)


def test_a_copy_waits_for_a_gc_and_a_gc_sees_what_is_copied() -> None:
    """While a lock is there no chunk is put, but the intent is; when the lock's time is over the copy goes on."""

    async def main(world: World) -> None:
        made = make_model()
        await publish(world.na.objects, made, clock=world.clock)
        await world.eu.objects.put(f"{COLLECTING}{1:016x}", LOCK_FORMAT.seal(Lock(120.0)))
        await world.mirror(WEIGHTS)
        await asyncio.sleep(60.0)
        assert not set(made.chunks) & world.eu.objects.stored.keys()
        [intent] = [name for name in world.eu.objects.stored if name.startswith(PUBLISHING)]
        assert decode(world.eu.objects.stored[intent], intent) == made.manifest
        await asyncio.sleep(100.0)
        assert has(world.eu, made) and intent not in world.eu.objects.stored

    simulate(main)


def test_what_home_made_and_lost_comes_back_from_a_copy() -> None:
    """It is announced as made here again."""

    async def main(world: World) -> None:
        made = make_model()
        await put_model(world.na.objects, made)
        copy = msgspec.structs.replace(made.announced, origin="eu")
        await announce_models(world.na.objects, [copy], world.clock, random.Random())
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        assert has(world.eu, made) and announced(world.eu) == [made.announced]

    simulate(main)


def test_a_store_that_fails_is_tried_again_and_packs_go_on() -> None:
    """While puts of chunks fail, KV of the same mirror is copied."""

    async def main(world: World) -> None:
        made, kv = make_model(), pack("kv")
        real = world.eu.objects.put
        is_broken = True

        async def put(name: str, content: Any, only_new: bool = False) -> bool:
            if is_broken and name.startswith(CHUNKS):
                raise ObjectUnavailable("eu: away")
            return await real(name, content, only_new)

        world.eu.objects.put = put  # type: ignore[method-assign]  # fails for chunks
        await publish(world.na.objects, made, clock=world.clock)
        await world.na.make(kv)
        await world.mirror(WEIGHTS, Rule())
        await asyncio.sleep(SOON_S)
        assert world.eu.has(kv) and (await state_of(world)).failures[0].reason == "eu: away"
        is_broken = False
        await asyncio.sleep(2 * COPY_BACKOFF_S_MAX)
        assert has(world.eu, made)

    simulate(main)


def test_a_rate_holds_for_chunks() -> None:
    """A rule with a rate copies so many bytes in a second, of all its models together."""

    async def main(world: World) -> None:
        made = [make_model(f"m{n}", chunks=20) for n in range(2)]
        await publish(world.na.objects, *made, clock=world.clock)
        await world.mirror(Rule(of_weights=True, bytes_per_s=100))
        await asyncio.sleep(30.0)
        chunks = sum(name.startswith(CHUNKS) for name in world.eu.objects.stored)
        assert 15 <= chunks <= 31
        await asyncio.sleep(30.0)
        assert has(world.eu, *made)

    simulate(main)


def test_a_manifest_that_lies_is_refused() -> None:
    """One that is not what was announced, or that lies under another's name, is copied by nobody."""

    async def main(world: World) -> None:
        told, other = make_model(seed="told"), make_model(seed="other")
        await publish(world.na.objects, told, clock=world.clock)
        await put_model(world.na.objects, other)
        elsewhere = make_model("elsewhere")
        await publish(world.na.objects, elsewhere, clock=world.clock)
        world.na.objects.stored[elsewhere.name] = world.na.objects.stored[other.name]
        await world.mirror(WEIGHTS)
        await asyncio.sleep(SOON_S)
        reasons = " ".join(failure.reason for failure in (await state_of(world)).failures)
        assert "is not the one that was announced" in reasons and "says it is" in reasons
        assert not announced(world.eu)

    simulate(main)
