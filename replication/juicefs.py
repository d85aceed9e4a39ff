"""The `juicefs` command line: which one is there, what its `sync` can do, and how a store is named to it.

What was seen of it, and what is done about it:

* Credentials may stand in its URLs, and argument lists are public: ours never hold any. It finds them as we do, in the
  environment or the machine's role.
* 0.14 copies what `--include` names only where `--exclude` is given, too; else everything.
* A source that is not there lists as empty, with exit code 0; 0.14 even makes the directory. A command line without a
  destination is exit code 0 as well, and so is a sync that was interrupted (1.4, with checkpoints): only a run whose last
  line counts what it copied has ended.
* It compares sizes, not bytes: nobody believes what it copied before it is compared with what was announced.
* It opens a door on 127.0.0.1: 0.14 for debugging (of code, not of memory or credentials), at a port that nobody can choose,
  with `--http-port` neither; later ones for metrics, and with `--no-agent` no other.
* It deletes only where it is told to: it is never told.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from replication.constants import JUICEFS_ASK_S_MAX, JUICEFS_THREADS
from replication.errors import BulkCopyRefused
from tiers.object_options import ObjectOptions

PROGRAM = "juicefs"
_VERSION = re.compile(r"version v?([0-9][0-9A-Za-z.+-]*)")
_ENDED = re.compile(r"<INFO>: Found: [0-9]+,.*\bcopied: ([0-9]+)")
_COMPLAINT = re.compile(r"<(?:ERROR|FATAL)>:(.*(?:\n(?!.*<[A-Z]+>:).+)*)")  # with the lines that belong to it


@dataclass(frozen=True)
class Juicefs:
    """A program that is there. takes_list: it has `--files-from`; else it is 0.14, and takes regular expressions."""

    path: str
    version: str
    takes_list: bool

    def sync(self, place: Address, folder: str, names: Sequence[str], list_file: str) -> list[str]:
        """The command that copies these names, of the place, into a folder ("packs/"), as they are below it.

        list_file: where the names stand, one a line, if it takes a list.
        """
        words = [self.path, "--no-agent", "sync", f"--threads={JUICEFS_THREADS}", *place.flags]
        if self.takes_list:
            words += ["--metrics=127.0.0.1:0", f"--files-from={list_file}"]
        else:
            words += [f"--start={min(names)}", f"--end={max(names)}", r"--exclude=(^|/)[.]"]
            words += [f"--include={pattern}" for pattern in _patterns(names)]
        return [*words, place.url, folder]


@dataclass(frozen=True)
class Address:
    """A folder of a store, as the program is told it: url ends in "/". environment: what it needs besides ours. directory: the
    folder itself, if it is one."""

    url: str
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    directory: str = ""


async def find_juicefs() -> Juicefs:
    """The one on PATH. Raises BulkCopyRefused."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise BulkCopyRefused(f"there is no {PROGRAM} on PATH")
    said = await _said(path, "--version")
    found = _VERSION.search(said)
    if found is None:
        raise BulkCopyRefused(f"{path} --version: does not say which version it is")
    usage = await _said(path, "sync", "--help")
    takes_list = "--files-from" in usage
    if not takes_list and "POSIX regular expressions" not in usage:
        raise BulkCopyRefused(f"{path} is {found[1]}: needed is 1.3 or newer, for sync --files-from")
    return Juicefs(path, found[1], takes_list)


def address(url: str, options: ObjectOptions, folder: str, environ: Mapping[str, str]) -> Address:
    """A folder ("packs/") of a store that we open with this URL and these options. environ: where the rest is.

    Raises BulkCopyRefused where the program cannot be told it without credentials, or would take it for another one.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        directory = os.path.join(unquote(rest), folder)
        return Address(f"file://{quote(directory)}", directory=directory)
    if scheme != "s3":
        raise BulkCopyRefused(f"{url}: allowed are s3:// and file:///")
    bucket, _, prefix = rest.partition("/")
    if "." in bucket:  # it takes the first part of a host for the bucket
        raise BulkCopyRefused(f"{url}: allowed are buckets without a dot in their names")
    below = f"{prefix.strip('/')}/{folder}".lstrip("/")
    region = options.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    settings = (("AWS_REGION", region), ("AWS_DEFAULT_REGION", region))
    if options.endpoint:
        host, flags = _endpoint(url, options)
        return Address(f"s3://{bucket}.{host}/{below}", flags, settings)
    if environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"):
        raise BulkCopyRefused(
            f"{url}: its endpoint is in the environment: allowed is one in the file of regions"
        )
    china = ".cn" if region.startswith("cn-") else ""
    return Address(f"s3://{bucket}.s3.{region}.amazonaws.com{china}/{below}", (), settings)


def copied(said: str) -> int | None:
    """How many objects a run copied, by its last words; None if it did not end."""
    found = _ENDED.findall(said)
    return int(found[-1]) if found else None


def complaint(said: str) -> str:
    """The last error in what a run said, in one line; "" without one."""
    found = _COMPLAINT.findall(said)
    return " ".join(found[-1].split()) if found else ""


def _endpoint(url: str, options: ObjectOptions) -> tuple[str, tuple[str, ...]]:
    """Host and port, and flags."""
    parts = urlsplit(options.endpoint)
    host = parts.hostname or ""
    if not options.path_style:
        raise BulkCopyRefused(f"{url}: allowed is an endpoint with path_style on")
    try:
        is_number = bool(ipaddress.ip_address(host))
    except ValueError:
        is_number = False
    if ":" in host or (is_number and parts.scheme == "https"):  # it speaks no TLS to a number
        raise BulkCopyRefused(
            f"{url}: {options.endpoint}: allowed are names of hosts, and http://1.2.3.4:port"
        )
    return parts.netloc, ("--no-https",) if parts.scheme == "http" else ()


def _patterns(names: Sequence[str]) -> list[str]:
    """Regular expressions that fit these names and no other ones: one for each of their folders."""
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        by_folder.setdefault(folder, []).append(re.escape(last))
    return [f"^{re.escape(folder)}/({'|'.join(lasts)})$" for folder, lasts in by_folder.items()]


async def _said(*words: str) -> str:
    """Everything that a program says within seconds. Raises BulkCopyRefused."""
    shown = " ".join(words)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise BulkCopyRefused(f"{shown}: {error.strerror}") from error
    try:
        async with asyncio.timeout(JUICEFS_ASK_S_MAX):
            output, _ = await process.communicate()
    except TimeoutError:
        raise BulkCopyRefused(f"{shown}: no answer within {JUICEFS_ASK_S_MAX:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace")
