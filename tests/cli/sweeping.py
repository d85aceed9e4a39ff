"""Every command of the real parsers with everything that can be wrong in it, one thing at a time; a line for each case that went wrong.

    parsers() ─▶ commands, options, arguments ─▶ cases(): words with one wrong value ─▶ main() in a process of that command
                                                                                              │
    what is wrong of code, stderr, time, files: complaints, JSON lines on stdout ◀────────────╯

A case is right when it says in one line what is wrong, where, and what is allowed, with the exit code of docs/cli.md, soon, and
leaves nothing behind. With the socket of a daemon that one
asked. EVERY=n takes each n-th value only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from kvstore.client import Client  # noqa: F401 imported once, and not in each process
from kvstore.daemon.config.config_sources import load  # noqa: F401 likewise
from kvstore.tools.cli import COMMANDS, main, parser_of
from kvstore.tools.cli.options import NODE_FILES

CASE_S = 20.0  # on a machine that does other things
LINE_CHARS_MAX = 2000
OURS = re.compile(  # what only who wrote it understands
    r"Traceback|\bErrno\b|NoneType|object at 0x|embedded null|codec|set_int_max|invalid (Path|_\w+|int|float) value"
    r"|\[Errno|<class|validation error|ValueError|TypeError|KeyError"
)
Path_ = tuple[str, ...]


class Value(NamedTuple):
    """codes: that are right for it; every documented one where none are named."""

    text: str
    codes: frozenset[int] = frozenset({0, 1, 2, 3, 4})


class Case(NamedTuple):
    """names: one of these stands in the line. environ: of this process, meanwhile."""

    words: list[str]
    codes: frozenset[int]
    names: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}


USAGE, MISSING, AWAY = frozenset({2}), frozenset({3}), frozenset({4})
ANY = Value("").codes
LONG, UNICODE, CONTROL = "x" * 100_000, "naïve-雪-🦙", "\x1b[2Jx\x07\ny"
NUMBERS = (
    "",
    " ",
    "x",
    "-1",
    "nan",
    "inf",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "1.5.2",
    "0x10",
    "½",
    CONTROL,
    "1 2",
    LONG,
)
TIMES = (*NUMBERS, "-1h", "1 fortnight", "1h2m", "h")
SIZES = (*NUMBERS, "-1GiB", "1GB2", "GiB", "1.0000000001KiB")
HEX = ("", " ", "zz", "g" * 64, "ａｂｃｄ", "0xabcd", UNICODE, CONTROL, "a" * 5000)
PLACES = (
    "",
    " ",
    "x",
    ":",
    "1.2.3.4",
    "1.2.3.4:99999",
    "1.2.3.4:-1",
    "1.2.3.4:x",
    "[::1:80",
    "[::1]",
    UNICODE,
    CONTROL,
    LONG,
)
URLS = (
    "",
    " ",
    "x",
    "ftp://h/x",
    "file:relative",
    "s3://",
    "://",
    "http://",
    "s3://b\x1b/x",
    "s3://bücket",
    "s3://" + LONG,
    UNICODE,
)
NAMES = ("", " ", UNICODE, CONTROL, LONG, "../../etc", "a/b", "-x", "@", "a@b@c")

# What an argument of this kind, as its help has it, never is.
WRONG = {
    **dict.fromkeys(("N", "K", "ID", "SHARE", "DAYS"), NUMBERS), "TIME": TIMES, "SIZE": SIZES, "RATE": SIZES, "URL": URLS,
    "WHEN": (*TIMES, "2026-13-45", "tomorrow"), **dict.fromkeys(("DIGEST", "HASH", "PREFIX", "TOMBSTONE", "HEX"), HEX),
    **dict.fromkeys(("ADDRESS:PORT", "HOST:PORT"), PLACES), "IDS": (*(text for text in NUMBERS if text != "1 2"), ",", "1,,x", "1;2"),
    **dict.fromkeys(("LIST", "KEY=VALUE"), (*NAMES, "=", "a=b", ",", "log.levle=debug", "log.level=loud")),
}  # fmt: skip


class Sandbox:
    """Directories, files and buckets of one sweep: what commands may name, and what nobody may change."""

    def __init__(self, path: Path, socket: str) -> None:
        self.path, self.socket = path, socket
        for name in ("home", "tmp", "na", "eu", "model", "cwd"):
            (path / name).mkdir()
        (path / "file").write_text("no file of ours\n")
        (path / "secret").write_text("x")
        (path / "secret").chmod(0)
        (path / "shut").mkdir(0)  # nobody may look at what is in it
        (path / "loop").symlink_to("loop")
        os.mkfifo(path / "fifo")
        (path / "model" / "config.json").write_text("{}")
        (path / "trace.jsonl").write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n')
        lines = ['deployment = "acme"', *(f'[regions.{n}]\nurl = "file://{path / n}"' for n in ("na", "eu"))]
        (path / "regions.toml").write_text("\n".join([*lines, ""]))
        (path / "kvstore.toml").write_text(
            f'data_dir = "{path / "data"}"\nregions_file = "{path / "regions.toml"}"\nregion = "na"\n'
            f'[models]\ndir = "{path / "models"}"\n[dram]\ndirectory = "{path / "tmp"}"\n'
        )
        os.chdir(path / "cwd")
        for name in [name for name in os.environ if name.startswith(("KVSTORE_", "XDG_", "AWS_"))]:
            del os.environ[name]
        os.environ |= {"HOME": str(path / "home"), "TMPDIR": str(path / "tmp"), "KVSTORE_CONFIG": ""}
        os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
        os.environ["META_PASSWORD"] = "x"

    def there(self) -> set[str]:
        return {
            os.path.join(top, name) for top, dirs, files in os.walk(self.path) for name in (*dirs, *files)
        }

    def remove(self, paths: set[str]) -> None:
        for path in sorted(paths, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    def inputs(self) -> Iterator[Value]:
        """Of an option whose file or directory is read."""
        yield from (Value("", USAGE), Value(" ", USAGE | MISSING))
        yield from (Value(f"{self.path}/{name}", MISSING) for name in ("none", UNICODE, "none/none"))
        yield from (
            Value(f"{self.path}/{name}", USAGE | MISSING)
            for name in (
                "file",
                "file/x",
                "secret",
                "shut",
                "loop",
                "fifo",
                "na",
                "x" * 300,
                "x/" * 3000,
                CONTROL,
            )
        )
        yield from (Value(f"{self.path}/shut/x", frozenset({1, 2, 3})), Value("/dev/zero", USAGE | MISSING))

    def outputs(self) -> Iterator[Value]:
        """Of one whose file is written."""
        yield from (Value("", USAGE), Value(f"{self.path}/none/x", MISSING))
        refused = frozenset({1, 2, 3})
        yield from (
            Value(f"{self.path}/{name}", refused)
            for name in ("file/x", "shut/x", "fifo", "na", "x" * 300, "x/" * 3000)
        )
        yield Value(f"{self.path}/loop")  # may be replaced


# -- what there is --


def parsers() -> Iterator[tuple[Path_, argparse.ArgumentParser]]:
    """All commands, with their verbs and actions."""
    for command in COMMANDS:
        yield from _below((command,), parser_of(command))


def _below(path: Path_, parser: argparse.ArgumentParser) -> Iterator[tuple[Path_, argparse.ArgumentParser]]:
    if fill := getattr(parser, "fill", None):
        fill()
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path, parser
    for action in inner:
        for name, below in action.choices.items():
            yield from _below((*path, name), below)


# -- what is right --

OUTPUTS = {
    ("record", "file"),
    ("report", "html"),
    ("replay", "html"),
    ("doctor", "bundle"),
    ("config", "config"),
}
# Of one argument: what else makes the command complete.
INSTEAD = {
    ("explain", "tokenizer"): "x", ("region erase", "prefix"): "--yes --namespace " + "ab" * 16, ("quota", "tenant"): "--dram 1GiB",
    ("quota", "namespace"): "--dram 1GiB", ("clear", "tenant"): "--yes", ("clear", "namespace"): "--yes", ("clear", "prefix"): "--yes",
    ("region erase", "tenant"): "--yes", ("region erase", "namespace"): "--yes", ("region erase", "cancel"): "--yes",
    ("model plan", "nic"): "--size 1GiB --nvme 1GBps --store 1Gbps", ("model plan", "nvme"): "--size 1GiB --nic 1Gbps --store 1Gbps",
    ("model plan", "store"): "--size 1GiB --nic 1Gbps --nvme 1GBps", ("model plan", "size"): "--nic 1Gbps --nvme 1GBps --store 1Gbps",
    **dict.fromkeys((("model plan", name) for name in ("endpoint", "to", "region", "regions")), "m --nic 1Gbps --nvme 1GBps --store 1Gbps"),
}  # fmt: skip
RULES = {("ttl", "tenant"), ("quota", "tenant")}  # may be for one whose engines come later: said, and done
# Read only where something else is given, too.
UNUSED = {
    ("model plan", "config"),
    ("model plan", "set"),
    ("bench", "config"),
    ("bench", "set"),
    ("model publish", "key_file"),
}
ANYWHERE = {
    "into",
    "directory",
    "cache",
    "below",
    "path",
    "data_dir",
    "accept",
    "forget",
}  # a directory that is not read, or not yet
# Beside the positional arguments: what makes a command complete. Options of the second go without it.
COMPLETE: dict[Path_, tuple[str, set[str]]] = {
    ("ttl",): ("--tenant acme", {"namespace", "prefix", "tenant"}),
    ("quota",): ("--tenant acme --dram 1GiB", {"namespace", "tenant"}),
    ("clear",): ("--all --yes", {"tenant", "namespace", "prefix", "all"}),
    ("explain",): ("--tokens 1,2", {"prompt", "prefix", "engines", "tokens", "tokenizer"}),
    ("top",): ("--once --interval 0.1s", {"interval"}),
    ("clients",): ("--interval 0.1s", {"interval"}),
    ("record",): ("--for 0.1s", {"life"}),
    ("replay",): ("--policy lru --capacity 50%", {"policy", "capacity"}),
    ("region", "erase"): ("--tenant acme --dry-run", {"tenant", "namespace", "prefix", "ls", "cancel", "dry_run"}),
    ("region", "verify"): ("--deep", set()),
    ("warm",): ("--dry-run", {"dry_run", "cancel"}),
    ("model", "publish"): ("--name m", {"name"}),
    ("model", "plan"): ("--size 1GiB --nic 1Gbps --nvme 1GBps --store 1Gbps", {"name", "size", "nic", "nvme", "store", "endpoint", "to", "region", "regions"}),
    ("model", "volume", "format"): ("--store file:///nowhere/x", {"store"}),
    ("model", "volume", "mount"): ("--cache {path}/none", {"cache"}),
    ("bench",): ("--only lookup --dir {path}/none", {"dir", "only"}),
    # What would serve if nothing were wrong: a region that nobody knows keeps it from that.
    ("serve",): ("--set region=nowhere", set()),
    ("mirror",): ("--set region=nowhere", set()),
    ("web",): ("--listen {busy}", {"listen"}),
    ("grpc",): ("--listen {busy}", {"listen"}),
}  # fmt: skip
POSITIONAL = {
    "PREFIX": "ab" * 32, "NAME": "na", "REGION": "na", "TIME": "1h", "KEY": "log.level", "VALUE": "debug",
    "TRACE": "{path}/trace.jsonl", "FILE": "{path}/cwd/new", "DIR": "{path}/model", "NAME[@REVISION]": "m",
    "NAME@REVISION": "m@r", "META": "sqlite3:///{path}/none/meta", "SOURCE": "{path}/none", "DESTINATION": "{path}/none2",
    "PATH": "{path}/none",
}  # fmt: skip
HIDDEN = {"child", "access", "tls"}  # between processes of ours


def complete(
    path: Path_, parser: argparse.ArgumentParser, box: Sandbox, without: argparse.Action | None, busy: str
) -> list[str]:
    """Words of this command in which nothing is wrong, without those for one argument."""
    fill = {"path": box.path, "busy": busy}
    words = list(path)
    text, conflicts = COMPLETE.get(path, ("", set()))
    if without is None or without.dest not in conflicts:
        words += text.format(**fill).split()
    else:
        words += INSTEAD.get((" ".join(path), without.dest), "").format(**fill).split()
    options = {option for action in parser._actions for option in action.option_strings}
    socket = (
        []
        if without is not None and without.dest in ("config", "data_dir", "set")
        else [("--socket", box.socket)]
    )
    for option, value in (
        ("--config", f"{box.path}/kvstore.toml"),
        *socket,
    ):  # with a socket no settings are read
        if option in options and (without is None or option not in without.option_strings):
            words += [option, value]
    for action in parser._actions:
        if not action.option_strings and action.required and action is not without:
            some = next(iter(action.choices)) if action.choices else POSITIONAL[str(action.metavar)]
            words.append(str(some).format(**fill))
    return words


# -- what is wrong --


def values(path: Path_, action: argparse.Action, box: Sandbox, asks: bool) -> Iterator[Value]:
    """What one argument of a command cannot be, and what it can be that looks odd. asks: whether it is of one that asks the daemon."""
    kind, whose = str(action.metavar or ""), (path[0], action.dest)
    if (" ".join(path), action.dest) in UNUSED:
        return
    if action.choices is not None:
        yield from (Value(text, USAGE) for text in NAMES)
    elif action.dest == "socket":
        away = AWAY if asks else ANY  # others have no use for it
        yield Value("", USAGE)
        yield from (
            Value(f"{box.path}/{name}", away)
            for name in ("none", "file", "na", UNICODE, "loop", "secret", "shut/x", CONTROL)
        )
        yield from (Value(f"{box.path}/{name}", USAGE if asks else ANY) for name in ("x" * 300, "x/" * 3000))
    elif action.type is Path:
        if whose in OUTPUTS:
            yield from box.outputs()
        elif action.dest in ANYWHERE:
            yield from (Value(one.text) for one in box.inputs())
            yield Value("", USAGE)
        else:
            works = f"{box.path}/na" if whose == ("bench", "dir") else ""  # a directory is what it wants
            yield from (one for one in box.inputs() if one.text != works)
    elif action.dest in NODE_FILES:
        yield from (Value(text, USAGE) for text in ("x", str(box.path)))  # without --node
    elif kind in WRONG:
        yield from (Value(text, USAGE) for text in WRONG[kind])
    else:
        is_known = kind.startswith("NAME") and whose not in RULES
        yield from (Value(text, ANY - {0} if is_known else ANY) for text in NAMES)
    yield Value("a\0b", USAGE)


def cases(
    path: Path_, parser: argparse.ArgumentParser, box: Sandbox, busy: str, asks: bool
) -> Iterator[Case]:
    """Of one command: each has one thing wrong."""
    options = [option for action in parser._actions for option in action.option_strings if len(option) > 2]
    whole = complete(path, parser, box, None, busy)
    for action in parser._actions:
        if action.dest not in HIDDEN and not isinstance(action, argparse._HelpAction):
            yield from _of_argument(path, complete(path, parser, box, action, busy), action, box, asks)
    for option in options:
        near = option[:-2] + option[-1] + option[-2] + "z" if len(option) > 4 else option + "z"
        yield Case([*whole, near], USAGE, ("did you mean --",))
    yield Case([*whole, "--nothing-like-it=3"], USAGE, ("--nothing-like-it",))
    takes_more = any(
        not action.option_strings and action.nargs in ("?", "*", "+") for action in parser._actions
    )
    for word in ("one-more", "\udcff"):
        yield Case([*whole, word], ANY if takes_more else USAGE)


def _of_argument(
    path: Path_, words: list[str], action: argparse.Action, box: Sandbox, asks: bool
) -> Iterator[Case]:
    """words: the rest of the command."""
    names = (
        "required: ",
        *action.option_strings,
        str(action.metavar or action.dest),
        action.dest.replace("_", "-"),
    )
    option = action.option_strings[-1] if action.option_strings else ""
    if not option and action.required:
        yield Case(words, USAGE, names)
    if action.nargs == 0:
        yield Case([*words, f"{option}=1"], USAGE, names)
        yield Case([*words, option, option], ANY)
        return
    if option and action.nargs != "?":
        yield Case([*words, option], USAGE, names)
    for value in values(path, action, box, asks):
        named = (*names, value.text[:40], "NUL character") if value.text.strip() else names
        codes = value.codes
        if path == ("doctor",) and action.dest in ("config", "set", "socket"):
            codes |= {0, 1}  # it is what it was asked for
        elif path[:2] == ("model", "volume"):
            codes |= {1}  # where there is no juicefs
        yield Case([*words, f"{option}={value.text}" if option else value.text], codes, named)
        if option and value.text.startswith("-"):
            yield Case([*words, option, value.text], codes, named)


def environments(box: Sandbox) -> Iterator[Case]:
    """What the environment says, of commands that read all of it."""
    odd = ("", "relative", f"{box.path}/none", f"{box.path}/file", "\udcff", UNICODE, "x" * 5000)
    usage = {"relative": USAGE, "\udcff": USAGE, UNICODE: USAGE, "": USAGE, "x" * 5000: USAGE}
    for words in (
        ["status"],
        ["config", "show"],
        ["model", "ls", "--local"],
        ["explain", "--tokens", "1,2"],
        ["config", "check"],
    ):
        for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "TMPDIR"):
            yield from (Case(words, ANY, environ={name: text}) for text in odd)
        for name in (
            "KVSTORE_SOCKET_PATH",
            "KVSTORE_DATA_DIR",
            "KVSTORE_REGIONS_FILE",
            "KVSTORE_MODELS__DIR",
        ):
            for text in odd:
                codes = ANY if text == "" and name == "KVSTORE_REGIONS_FILE" else usage.get(text, ANY)
                yield Case(
                    words,
                    codes if name != "KVSTORE_DATA_DIR" or len(text) < 5000 else ANY,
                    (name,),
                    {name: text},
                )
        for one in box.inputs():
            if one.text.strip():
                yield Case(words, one.codes, (one.text[:40],), {"KVSTORE_CONFIG": one.text})
        for name, text in (("TERM", "x"), ("TERM", ""), ("COLUMNS", "x"), ("COLUMNS", "-1"), ("COLUMNS", "9" * 30), ("LC_ALL", "x"),
                           ("PYTHONHASHSEED", "x"), ("NO_COLOR", "")):  # fmt: skip
            yield Case(words, ANY, environ={name: text})
        for name in ("KVSTORE_DRAM_CAPACITY_BYTES", "KVSTORE_", "KVSTORE_ÄÖ"):
            yield Case(words, USAGE, (name,), {name: "1"})


def nodes(box: Sandbox) -> Iterator[Case]:
    """--node, with what goes with it."""
    for path, parser in parsers():
        if any(action.dest == "node" for action in parser._actions):
            words = [
                word
                for word in complete(path, parser, box, None, "")
                if word != "--once" and not word.endswith("0.1s")
            ]
            words = [word for word in words if word not in ("--interval", "--dry-run", "--deep")]
            words += ["--yes"] if path == ("region", "erase") else []
            for option in ("--config", "--socket"):
                del words[words.index(option) : words.index(option) + 2]
            for place in PLACES[2:]:
                yield Case([*words, f"--node={place}"], USAGE, ("HOST:PORT",))
    words = ["ping", "--node=127.0.0.1:1"]
    yield Case(words, AWAY)
    for name in ("none", "secret", "na", "fifo"):
        file = f"{box.path}/{name}"
        yield Case([*words, f"--node-ca={file}"], MISSING if name == "none" else USAGE, (file,))


# -- one case --


class TooLong(BaseException):
    pass


def tried(case: Case, box: Sandbox, before: set[str]) -> tuple[dict[str, Any] | None, int]:
    """What is wrong with how it ended, None where nothing is; and its exit code."""
    out, err = _stream("out"), _stream("err")
    streams, begun_s, code, bug = (sys.stdout, sys.stderr), time.monotonic(), -1, ""
    sys.stdout, sys.stderr = out, err
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, CASE_S / 2)
    environ = dict(os.environ)
    os.environ.update(case.environ)
    try:
        code = main(case.words)
    except BaseException as error:  # noqa: BLE001 that is what is looked for
        bug = "".join(traceback.format_exception(error))[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout, sys.stderr = streams
        os.umask(0o022)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
    printed = _content(out, False)
    said = _content(err, code > 0 and not printed)
    made = box.there() - before
    box.remove(made)
    wrong = bug or _wrong(case, code, printed, said, made if code not in (0, -1) else set())
    if not wrong:
        return None, code
    words = [f"{name}={text}" for name, text in case.environ.items()] + case.words
    words = [word if len(word) < 200 else f"{word[:60]}… ({len(word)})" for word in words]
    return {
        "words": words, "why": wrong, "code": code, "allowed": sorted(case.codes), "took_s": round(time.monotonic() - begun_s, 2),
        "stderr": said[:600], "stdout": printed[:200], "made": sorted(made),
    }, code  # fmt: skip


def _stream(name: str) -> TextIO:
    """A file: what serves hands its output over to a thread."""
    return open(os.memfd_create(name), "w+", encoding="utf-8", errors="surrogateescape")


def _content(stream: TextIO, is_needed: bool) -> str:
    """is_needed: something comes, perhaps from another thread."""
    stream.flush()
    for _ in range(100 if is_needed else 0):
        if os.fstat(stream.fileno()).st_size:
            break
        time.sleep(0.01)
    with open(f"/proc/self/fd/{stream.fileno()}", encoding="utf-8", errors="replace") as file:
        text = file.read()
    stream.close()
    return text


def _too_long(*_: object) -> None:
    raise TooLong


def _wrong(case: Case, code: int, out: str, err: str, made: set[str]) -> str:
    """The first of what is wrong, "" where nothing is."""
    lines = [
        line
        for line in err.splitlines()
        if not line.startswith(("replay: ", "bench: ")) and " [info " not in line
    ]
    ours = [line for line in lines if line.startswith("kvstore: ")]
    said = "\n".join(lines)
    if code not in case.codes:
        return f"exit code {code}"
    if code == 0 or (code == 1 and out and not lines):
        return ""
    if not ours:
        return "nothing is said"
    if len(lines) > 1:
        return f"{len(lines)} lines"
    if len(said) > LINE_CHARS_MAX:
        return f"a line of {len(said)} characters"
    if (found := OURS.search(said)) is not None:
        return f"words of ours: {found.group()}"
    if code == 2 and out:
        return "something on stdout"
    if made:
        return "something is left behind"
    if case.codes == USAGE and case.names and not any(name.lower() in said.lower() for name in case.names):
        return f"none of {', '.join(case.names)} is named"
    return ""


# -- all of them --


def sweep(
    box: Sandbox, every: int, report: Callable[[dict[str, Any]], None], only: Collection[str] = ()
) -> int:
    """Each command in a process of its own; how many cases there were."""

    total = 0
    kinds: dict[str, Callable[[], Iterator[Case]]] = {
        " ".join(path): partial(_of_command, path, parser, box) for path, parser in parsers()
    }
    kinds |= {"environment": partial(environments, box), "node": partial(nodes, box)}
    for number, (name, cases_of) in enumerate(kinds.items()):
        if only and name not in only:
            continue
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            code = 1
            try:
                _child(cases_of, box, every, number, writing)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        total += _followed(name, pid, reading, report)
    return total


def _of_command(path: Path_, parser: argparse.ArgumentParser, box: Sandbox) -> Iterator[Case]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        _, code = tried(Case(complete(path, parser, box, None, busy), ANY), box, box.there())
        yield from cases(path, parser, box, busy, asks=code == 4)


def _child(
    cases_of: Callable[[], Iterator[Case]], box: Sandbox, every: int, number: int, writing: int
) -> None:
    """Every n-th case, each n-th of another command another one."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115 needed until the process ends
    before = box.there()
    with os.fdopen(writing, "w") as pipe:
        for n, case in enumerate(cases_of()):
            if (n + number) % every:
                continue
            print(json.dumps({"case": [word[:80] for word in case.words]}), file=pipe, flush=True)
            complaint, _ = tried(case, box, before)
            if complaint:
                print(json.dumps(complaint), file=pipe, flush=True)


def _followed(name: str, pid: int, reading: int, report: Callable[[dict[str, Any]], None]) -> int:
    count, last = 0, "its beginning"
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        rest = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], CASE_S)
            chunk = pipe.read(1 << 16) if ready else None
            if not ready:
                os.kill(pid, signal.SIGKILL)
                report({"words": [name], "why": f"does not end: {last}"})
                break
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                row = json.loads(line)
                if "case" in row:
                    count, last = count + 1, str(row["case"])
                else:
                    report(row)
    _, status = os.waitpid(pid, 0)
    if status:
        report({"words": [name], "why": f"ended with status {status} at {last}"})
    return count


if __name__ == "__main__":
    where, at, *commands = sys.argv[1:]
    done = sweep(
        Sandbox(Path(where), at or f"{where}/away"),
        int(os.environ["EVERY"]),
        lambda row: print(json.dumps(row), flush=True),
        commands,
    )
    print(json.dumps({"cases": done}))
