"""Files that the daemon makes: nobody but its user reads them."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.tools.cli import auditing, child, main
from tests.coldstart.models import cut_evenly, made, put
from tests.region.regions import arguments, chain, init, regions_file, space_of, store
from tests.running import Daemon, Place, kvstore
from tiers.bucket.object_store import open_objects

OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(params=[0, 0o022], ids=["umask 0", "umask 022"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path, but: set[Path] = frozenset()) -> dict[Path, int]:  # type: ignore[assignment]
    found = (path for path in directory.rglob("*") if path not in but and not path.is_symlink())
    return {path: stat.S_IMODE(path.stat().st_mode) for path in found}


def region_with_a_model(path: Path) -> Path:
    file = regions_file(path, "na")
    init(file, "na")
    files = {"config.json": b"{}", "model.bin": b"w" * 5000}
    manifest, contents = made(files, cut_evenly(files, 1000), "tiny", "r1")
    asyncio.run(put(open_objects(f"file://{path / 'na'}"), manifest, contents))
    return file


def test_what_a_daemon_makes_is_its_users(place: Place, serve: Callable[..., Daemon], umask: int) -> None:
    """With records in memory, on NVMe and in the bucket, rules, accounts, a model, a page and gRPC; whatever the umask. Nothing is
    readable by group or others: not even the model, which engines of other users read when somebody preloads it for them."""
    file = region_with_a_model(place.path)
    (place.path / "shm").mkdir(mode=0o700)
    words = [*arguments(place, file, "na"), f"--set=nvme.directories={place.path / 'nvme'}"]
    more = [
        "models.preload=tiny",
        "durable.seen_times=1",
        "web.listen=127.0.0.1:0",
        "grpc.listen=127.0.0.1:0",
    ]
    before = {place.path, *modes(place.path)}
    daemon = serve(place, *words, *(f"--set={setting}" for setting in more))
    with Client(place.socket, timeout_s=10) as client:
        space, hashes = space_of(client, "acme"), chain("files", 8)
        client.lookup([space], hashes, ticket=1, tokens=512)
        store(client, space, hashes)
        assert kvstore("ttl", "1d", "--tenant=acme", f"--socket={place.socket}").returncode == 0
        give_up_s = time.monotonic() + 30
        wanted = [place.data_dir / "models", place.path / "na"]
        while (
            not all(set(modes(each)) - before for each in wanted)
            or client.status()["preloads"][0]["state"] != "there"
        ):
            assert time.monotonic() < give_up_s, client.status()["preloads"]
            time.sleep(0.05)
        running = modes(place.path, before)
    daemon.stop()
    found = {**running, **modes(place.path, before)}
    stderr = daemon.errors  # the test's own
    open_ = {str(path): oct(mode) for path, mode in found.items() if mode & OTHERS and path != stderr}
    assert not open_
    names = " ".join(str(path.relative_to(place.path)) for path in found)
    for part in ("data/kvstore", "data/models", "model.bin", ".arena", "nvme/", "na/"):
        assert part in names, part
    assert place.socket in running and stat.S_IMODE(place.data_dir.stat().st_mode) == 0o700


def test_a_model_that_somebody_preloads_is_for_other_users_to_read(tmp_path: Path, umask: int) -> None:
    """And never to write, whatever the umask: it is what engines compute with."""
    region_with_a_model(tmp_path)
    models = tmp_path / "models"
    done = kvstore("model", "preload", "tiny", f"--to=file://{tmp_path / 'na'}", f"--set=models.dir={models}")
    assert done.returncode == 0, done.stderr
    found = modes(models)
    assert not {path: mode for path, mode in found.items() if mode & stat.S_IWOTH}
    assert all(mode & stat.S_IROTH for path, mode in found.items() if path.name == "model.bin")


def test_a_command_notes_what_it_does_to_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however it ends; none that only looks, acts on this node, asks another one, or whose parent has noted it."""
    monkeypatch.setattr(auditing.audit, "to_syslog", lambda: None)
    caplog.set_level("INFO", "kvstore.audit")
    file = regions_file(tmp_path, "na")

    def noted(*words: str) -> list[tuple[str, str]]:
        caplog.clear()
        main(list(words))
        lines = [record.__dict__ for record in caplog.records if record.name == "kvstore.audit"]
        assert all(line["door"] == "cli" and line["who"] == f"uid {os.getuid()}" for line in lines)
        return [(line["action"], line["outcome"]) for line in lines]

    regions = f"--regions={file}"
    assert noted("region", "init", "na", regions) == [("region init", "ok")]
    assert noted("region", "init", "nowhere", regions) == [("region init", "failed")]
    assert noted("region", "ls", regions) == noted("model", "ls", f"--to=file://{tmp_path / 'na'}") == []
    assert noted("model", "gc", f"--to=file://{tmp_path / 'na'}") == [("model gc", "ok")]
    monkeypatch.setattr(child, "is_one", True)
    assert noted("region", "init", "na", regions) == []
