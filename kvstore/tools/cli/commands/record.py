"""Write down the requests that engines ask this daemon for, so that `kvstore replay` judges your own traffic.

  kvstore record trace.jsonl                    until Ctrl-C
  kvstore record trace.jsonl --for 1h           for an hour (90, 15min, 36h, 2d)
  kvstore record trace.jsonl --requests 10000   until so many came; with --for, whichever is first
  kvstore record trace.jsonl -o json            the summary for programs; docs/cli.md lists the fields

Each line is a request in the form of the Mooncake release: when it came (milliseconds from the start), how long
prompt and output were, and numbers for the prompt's blocks, so that one sees which prompts begin alike. There is
nothing else in the file: no text, no token, no hash, no name of a model or tenant. It is made with mode 0600, grows line by line,
and an existing one is not written over without --force. Engines notice nothing. Exit code 4 when no daemon answers
at the start; one that goes away later is waited for.
"""

from __future__ import annotations

import argparse
import signal
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.constants import DAY_S
from kvstore.tools.cli import NOT_FOUND, CliError
from kvstore.tools.cli.options import add_config_arguments, duration, whole
from kvstore.tools.cli.output import present
from kvstore.tools.cli.prefixes import ask
from kvstore.tools.cli.streams import drawing
from kvstore.units import count, format_bytes, format_duration, percent, plural, printable, short_count

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from kvstore.client import Client
    from kvstore.tools.replay.recorder import Recorder

REQUESTS_MAX = 10**12
RECORD_POLL_S, RECORD_S_MIN, RECORD_S_MAX = 0.25, 1e-3, 365 * DAY_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "text", "json")
    parser.add_argument("file", type=Path, metavar="FILE", help="a new file; one JSON object a line")
    parser.add_argument("--for", dest="life", metavar="TIME", help="how long, e.g. 15min")
    parser.add_argument(
        "--requests", type=whole(1, REQUESTS_MAX), metavar="N", help="end after so many requests"
    )
    parser.add_argument("--force", action="store_true", help="write over FILE")


def run(args: argparse.Namespace) -> int:
    for_s = None if args.life is None else duration("record: --for", args.life, RECORD_S_MIN, RECORD_S_MAX)
    _require_free(args.file, args.force)
    stop = _Stop()
    with stop:
        facts = ask(args, "record", lambda client: _record(client, args, for_s, stop))
    return present(args, facts, _print)


class _Stop:
    """asked: since the first Ctrl-C (SIGTERM, SIGHUP): record what there is, and end well. A second one interrupts."""

    def __init__(self) -> None:
        self.asked = False  # no Event: a handler may run while the main thread holds its lock
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._set)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _set(self, number: int, _: object) -> None:
        signal.signal(number, self._before[number])
        self.asked = True


def _record(client: Client, args: argparse.Namespace, for_s: float | None, stop: _Stop) -> dict[str, Any]:
    """Record until the end; the document of `-o json`. Raises CliError, and Unavailable where nobody answers at first."""
    from kvstore.tools.replay.recorder import Recorder, TraceFile

    first = client.record()
    begun_s = time.monotonic()
    if args.force:
        args.file.unlink(missing_ok=True)
    file = TraceFile(args.file)
    recorder = Recorder(file, begun_s, args.requests)
    try:
        recorder.take(first, begun_s)
        try:
            ended, interruptions = _until_end(client, recorder, for_s, begun_s, stop)
        finally:  # also what another daemon has refused to go on with
            recorder.write(time.monotonic(), all_of_it=True)
    except OSError as error:
        raise CliError(f"record: {args.file}: {error.strerror}") from error
    finally:
        file.close()
    refs, unique = recorder.block_refs, recorder.unique_blocks
    return {
        "file": str(args.file),
        "bytes": file.size_bytes,
        "duration_s": round(time.monotonic() - begun_s, 3),
        "ended": ended,
        "requests": recorder.requests,
        "input_tokens": recorder.input_tokens,
        "output_tokens": recorder.output_tokens,
        "block_refs": refs,
        "unique_blocks": unique,
        "reusable_ratio": round((refs - unique) / refs, 5) if refs else None,
        "lost_requests": recorder.lost_requests,
        "interruptions": interruptions,
    }


def _until_end(
    client: Client, recorder: Recorder, for_s: float | None, begun_s: float, stop: _Stop
) -> tuple[str, int]:
    """Why it ended, and how often the daemon went away. Raises OSError of the file, CliError."""
    from kvstore.client import Refused, Unavailable

    interruptions, is_away, left, ended = 0, False, 0, ""
    with _shown() as progress:
        while True:
            now_s = time.monotonic()
            progress.update(_line(recorder, now_s - begun_s, for_s))
            if not ended:
                ended = _end(recorder, None if for_s is None else begun_s + for_s - now_s, stop)
            if ended and (is_away or recorder.is_full):
                return ended, interruptions
            is_last = bool(ended)
            if not left and not is_last:
                wait_s = RECORD_POLL_S if for_s is None else min(RECORD_POLL_S, begun_s + for_s - now_s)
                time.sleep(max(0.0, wait_s))
            try:
                recorded = client.record()
            except Unavailable as error:
                if not is_away:
                    interruptions += 1
                    _say(f"{printable(str(error))}; waiting for it (what is asked meanwhile is missing)")
                    recorder.disconnected()
                is_away, left = True, 0
                recorder.write(time.monotonic())
                continue
            except Refused as error:
                raise CliError(f"record: {error.message}") from error
            if is_away:
                _say("the daemon is back")
                is_away = False
            recorder.take(recorded, time.monotonic())
            left = recorded.left
            if is_last and not left:
                return ended, interruptions


def _end(recorder: Recorder, left_s: float | None, stop: _Stop) -> str:
    """Why it is over, "" while it is not."""
    if stop.asked:
        return "interrupted"
    if recorder.is_full:
        return "requests"
    return "time" if left_s is not None and left_s <= 0 else ""


def _shown() -> Live:
    """A line on stderr that is written over, and goes away in the end, where that is a terminal; warnings stand above it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=drawing(sys.stderr), force_terminal=sys.stderr.isatty())
    return Live(console=console, transient=True, redirect_stdout=False)


def _line(recorder: Recorder, recorded_s: float, for_s: float | None) -> Text:
    from rich.text import Text

    rate = recorder.requests / max(1e-3, recorded_s)
    words = [plural(recorder.requests, "request"), f"{short_count(rate)}/s"]
    words.append(format_bytes(recorder.file.size_bytes))
    if for_s is not None:
        words.append(f"{format_duration(max(0.0, for_s - recorded_s))} left")
    line = f"record: {', '.join(words)} (Ctrl-C ends it)"
    return Text(line, no_wrap=True, overflow="ellipsis")


def _print(facts: dict[str, Any]) -> None:
    name = printable(facts["file"])
    size = format_bytes(facts["bytes"])
    print(
        f"{plural(facts['requests'], 'request')} in {format_duration(facts['duration_s'])}: {name} ({size})"
    )
    if facts["lost_requests"]:
        _say(
            f"{plural(facts['lost_requests'], 'request')} came faster than they were read, and are not in the file"
        )
    if not facts["requests"]:
        _say("no engine asked for anything; `kvstore status` lists those that are connected")
        return
    print(
        f"{count(facts['input_tokens'])} prompt tokens; of {plural(facts['block_refs'], 'block')} "
        f"{percent(facts['reusable_ratio'])} came again: what a cache without limits hits"
    )
    print(f"next: kvstore replay {name}")


def _require_free(path: Path, force: bool) -> None:
    """Raises CliError where FILE cannot be made, before a daemon is asked."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.absolute().parent.is_dir():
            why = f"record: {path}: no directory {path.absolute().parent}"
            raise CliError(why, exit_code=NOT_FOUND) from None
        return
    if not stat.S_ISREG(mode):
        raise CliError(f"record: {path}: is there already, and is no regular file")
    if not force:
        raise CliError(f"record: {path}: is there already; --force writes over it, another name keeps it")


def _say(line: str) -> None:
    print(f"kvstore: record: {line}", file=sys.stderr, flush=True)
