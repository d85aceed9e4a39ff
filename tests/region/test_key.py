"""A deployment with a key, with real processes: what is in the bucket, who reads it, and what becomes of a bucket in hostile hands."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from kvstore.client import Client
from tests.region.regions import (
    RECORD_BYTES,
    arguments,
    chain,
    content,
    init,
    read,
    regions_file,
    space_of,
    status,
    store,
    until,
)
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def keyed(path: Path, *keys: str) -> Path:
    """A file of regions with such a key file beside it."""
    file = regions_file(path, "na")
    (path / "keys").write_text("\n".join([*keys, ""]))
    (path / "keys").chmod(0o600)
    file.write_text(f'key_file = "{path / "keys"}"\n' + file.read_text())
    return file


def test_a_key_file_that_cannot_be_used(tmp_path: Path) -> None:
    """One line says why, with exit code 2, of one that is not there 3, and without the key."""
    file, secret = keyed(tmp_path, "x" * 31), "x" * 31
    keys, wrong = tmp_path / "keys", {}
    for name, text in (("short", secret), ("none", "\n"), ("twice", "y" * 32 + "\n" + "y" * 32)):
        keys.write_text(text)
        wrong[name] = kvstore("region", "ls", "--regions", file)
    keys.chmod(0o640)
    wrong["open"] = kvstore("region", "ls", "--regions", file)
    keys.unlink()
    wrong["gone"] = kvstore("region", "ls", "--regions", file)
    for name, words in {
        "short": "31 bytes",
        "none": "0 keys",
        "twice": "each once",
        "open": "chmod 600",
        "gone": "No such file",
    }.items():
        said = wrong[name].stderr
        assert wrong[name].returncode == (3 if name == "gone" else 2) and len(said.splitlines()) == 1, said
        assert f"{file}: key_file: {keys}: " in said and words in said and secret not in said


def test_a_region_with_a_key(tmp_path: Path, serve: Serve) -> None:
    """One node persists, another one hits; nobody without the key learns a tenant; what somebody else wrote is no hit and told, and
    the daemon, and one that comes later, serve; a new key takes over with `reseal`."""
    file = keyed(tmp_path, "k" * 32)
    init(file, "na")
    hashes, bucket = chain("prompt", 16), tmp_path / "na"
    first = _node(tmp_path, serve, file, "first")
    with Client(str(first.socket), timeout_s=5.0) as client:
        space = space_of(client, "some-tenant")
        store(client, space, hashes)
        for ticket in (1, 2):
            client.lookup([space], hashes, ticket=ticket, tokens=16 * 64)
        until(lambda: status(client).get("blocks") == 16)
    second = _node(tmp_path, serve, file, "second")
    with Client(str(second.socket), timeout_s=5.0) as client:
        space = space_of(client, "some-tenant")
        until(lambda: client.lookup([space], hashes, ticket=3, tokens=16 * 64) == 16)
        assert read(client, space, hashes) == 16
    second.stop(signal.SIGKILL)
    objects = [path for path in bucket.rglob("*") if path.is_file()]
    assert not any(b"some-tenant" in path.read_bytes() for path in objects)
    refused = kvstore("region", "ls", "--regions", _without_key(file))
    assert refused.returncode == 1 and "has no key_file" in refused.stdout

    (tmp_path / "keys").write_text("n" * 32 + "\n" + "k" * 32 + "\n")
    done = kvstore("region", "reseal", "na", "--regions", file)
    assert done.returncode == 0 and " objects resealed, 0 were" in done.stdout, done.stdout + done.stderr

    for path in (bucket / "packs").rglob("*"):
        if path.is_file():
            _forge(path)
    (bucket / "tombstones").mkdir()
    (bucket / "tombstones" / ("0" * 32)).write_bytes(b"KVTOMB1\n")
    third = _node(tmp_path, serve, file, "third")
    with Client(str(third.socket), timeout_s=5.0) as client:
        space = space_of(client, "some-tenant")
        until(lambda: client.lookup([space], hashes, ticket=4, tokens=16 * 64) == 16)
        assert read(client, space, hashes) == 15
        until(lambda: status(client)["corrupt_records"] and status(client)["untrusted_objects"])
        assert "it has no seal" in status(client)["problem"]
    with Client(str(first.socket), timeout_s=5.0) as client:
        assert read(client, space_of(client, "some-tenant"), hashes) == 16
    assert (third.stop(), first.stop()) == (0, 0)


def _node(tmp_path: Path, serve: Serve, file: Path, name: str) -> Daemon:
    (tmp_path / name).mkdir()
    place = Place(tmp_path / name)
    return serve(place, *arguments(place, file, "na"))


def _without_key(file: Path) -> Path:
    other = file.with_name("without.toml")
    other.write_text(file.read_text().partition("\n")[2])
    return other


def _forge(path: Path) -> None:
    """Other bytes of its last record."""
    sound = path.read_bytes()
    assert sound[-RECORD_BYTES:] == content(sound[-32:])
    path.write_bytes(sound[:-RECORD_BYTES] + bytes(RECORD_BYTES))
