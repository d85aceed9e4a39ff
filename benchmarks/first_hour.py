"""What a new user does in the first hour, from the built wheel, with a clock: `make first-hour`.

    wheel ─▶ a fresh environment ─▶ kvstore serve ─▶ vLLM, with one line of JSON ─▶ prompts, a restart, the same prompts
                                        │                                            ▲
                                        ╰─ top, /metrics, record, replay, doctor, clear, arena: what each must show

Nothing of the checkout is on any path: the environment has the wheel, and borrows the packages that the wheel and vLLM need
from the interpreter that runs this. Every step prints its time and what it showed; the first that does not show what it
must ends it with one line, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from examples.demo.model import TRAINING_TEXT, make_model

HOST = "127.0.0.1"
WEB_PORT = 9471
STEP_S_MAX = 300.0
ENGINE_START_S_MAX = 600.0
LOOK_AGAIN_S = 0.2
LOG_CHARS = 2000
PROMPTS = 4
ANSWER_TOKENS = 8
TRANSFER = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
QUIET = {  # vLLM on a machine of few cores, and without network
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class StepError(Exception):
    """A step did not show what it must."""


class Hour:
    """A directory of its own, the environment in it, and what runs."""

    def __init__(self, directory: Path, wheel: Path, stack: ExitStack) -> None:
        self.directory, self.wheel, self.stack = directory, wheel, stack
        self.bin = directory / "venv/bin"
        self.begun_s = time.monotonic()
        self.engines = 0
        self.page = self.instance = ""
        home = {
            "HOME": directory,
            "XDG_STATE_HOME": directory / "state",
            "XDG_RUNTIME_DIR": directory / "run",
        }
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHON"))
        }
        self.environment = {
            **kept,
            **{name: str(path) for name, path in home.items()},
            "PATH": f"{self.bin}:{kept['PATH']}",
        }
        if os.geteuid() == 0:  # whose places are /var/lib/kvstore and /run/kvstore: not ours to touch
            self.environment["KVSTORE_DATA_DIR"] = str(directory / "state/kvstore")
            self.environment["KVSTORE_SOCKET_PATH"] = str(directory / "run/kvstore.sock")
        if not _is_free(WEB_PORT):
            self.environment["KVSTORE_WEB__LISTEN"] = f"{HOST}:0"
        for place in ("run", "state"):
            (directory / place).mkdir(mode=0o700)

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Times it. What the block appends is printed behind the time."""
        begun_s, shown = time.monotonic(), list[str]()
        yield shown
        took_s = time.monotonic() - begun_s
        print(f"{took_s:6.1f} s  {name:<38} {'; '.join(shown)}", flush=True)

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """stdout of a command that ends. Raises StepError."""
        try:
            done = subprocess.run(
                words,
                check=False,
                cwd=self.directory,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=STEP_S_MAX,
            )
        except subprocess.TimeoutExpired as error:
            what = f"{' '.join(words)[:LOG_CHARS]}: not over within {STEP_S_MAX:g} s"
            raise StepError(f"{what}: is this machine busy?") from error
        if done.returncode not in codes:
            raise StepError(
                f"{' '.join(words)}: exit code {done.returncode}: {(done.stderr or done.stdout)[-LOG_CHARS:].strip()}"
            )
        return done.stdout

    def json(self, *words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """A command of ours with `-o json`."""
        document: dict[str, Any] = json.loads(self.run("kvstore", *words, "-o", "json", codes=codes))
        return document

    def start(self, log: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """A process that goes on; it ends with this one's work."""
        with (self.directory / log).open("wb") as file:
            process = subprocess.Popen(
                words,
                cwd=self.directory,
                env={**self.environment, **more},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.stack.callback(_end, process)
        return process

    def log(self, name: str) -> str:
        return (self.directory / name).read_text(errors="replace")

    def until(
        self,
        what: str,
        is_so: Callable[[], Any],
        timeout_s: float = STEP_S_MAX,
        of: Any = None,
        log: str = "",
    ) -> Any:
        """The first answer that is true. of: a process without which it never will be. Raises StepError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if answer := is_so():
                return answer
            if of is not None and of.poll() is not None:
                raise StepError(f"{what}: it ended with {of.returncode}: {self.log(log)[-LOG_CHARS:]}")
            time.sleep(LOOK_AGAIN_S)
        raise StepError(
            f"{what}: not within {timeout_s:g} s" + (f": {self.log(log)[-LOG_CHARS:]}" if log else "")
        )


def install(hour: Hour) -> None:
    with hour.step("pip install kvstore-llm") as shown:
        hour.run(sys.executable, "-m", "venv", "--without-pip", "venv")
        hour.run(
            *(sys.executable, "-m", "pip", "--python", str(hour.bin / "python"), "install", "-q"),
            *("--no-deps", "--no-index", "--disable-pip-version-check", str(hour.wheel)),
        )
        (site,) = (hour.directory / "venv/lib").glob("python*/site-packages")
        # A plain line: the .pth file of an editable project in there is not followed.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        found = hour.run("python", "-c", "import kvstore, vllm; print(kvstore.__file__)").splitlines()[-1]
        if not Path(found).is_relative_to(site):
            raise StepError(f"kvstore is imported from {found}")
        shown.append(hour.run("kvstore", "version").splitlines()[0])
    with hour.step("a tiny model"):
        make_model(hour.directory)


def serve(hour: Hour) -> subprocess.Popen[bytes]:
    with hour.step("kvstore serve") as shown:
        daemon = hour.start("serve.log", "kvstore", "serve")
        hour.until("serve", lambda: "ready socket=" in hour.log("serve.log"), of=daemon, log="serve.log")
        hour.instance = hour.json("ping")["instance"]

        def page() -> str:
            _, is_there, rest = hour.log("serve.log").partition("live page at ")
            return rest.split('"')[0].split()[0] if is_there else ""

        hour.page = hour.until("the web page", page, of=daemon, log="serve.log")
        shown.append(hour.page)
    return daemon


def engine(hour: Hour, name: str) -> tuple[subprocess.Popen[bytes], int]:
    """vLLM's server and its port; the connector has found the daemon."""
    hour.engines += 1
    log = f"engine-{hour.engines}.log"
    with hour.step(name), socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        probe.close()
        server = hour.start(
            *(log, "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "tiny-llama"),
            *(
                "--host",
                HOST,
                "--port",
                str(port),
                "--dtype",
                "float32",
                "--enforce-eager",
                "--block-size",
                "32",
            ),
            *("--kv-cache-memory-bytes", str(64 << 20), "--kv-transfer-config", json.dumps(TRANSFER)),
            **QUIET,
        )
        hour.until(
            "vLLM", lambda: _get(f"http://{HOST}:{port}/health") is not None, ENGINE_START_S_MAX, server, log
        )
    return server, port


def ask(hour: Hour, port: int, name: str) -> list[str]:
    """The answers to the prompts."""
    with hour.step(name) as shown:
        answers, first_s = [], time.monotonic()
        for number in range(PROMPTS):
            body = {
                "model": "tiny-llama",
                "prompt": f"User {number}: {TRAINING_TEXT}",
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
            }
            request = urllib.request.Request(
                f"http://{HOST}:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=STEP_S_MAX) as answer:
                    answers.append(json.load(answer)["choices"][0]["text"])
            except OSError as error:
                raise StepError(
                    f"{name}: {error}: {hour.log(f'engine-{hour.engines}.log')[-LOG_CHARS:]}"
                ) from error
        shown.append(f"{PROMPTS} answers in {time.monotonic() - first_s:.1f} s")
    return answers


def stored(hour: Hour) -> None:
    """Until the daemon holds what was computed: saves go on behind the answers."""
    with hour.step("kvstore status") as shown:

        def records() -> int:
            tiers = hour.json("status")["tiers"]
            return max(int(tier["records"]) for tier in tiers)

        least = hour.until("blocks in DRAM", lambda: records() >= PROMPTS and records())
        shown.append(f"{least} blocks in DRAM")


def see(hour: Hour) -> None:
    """Hits, wherever one looks."""
    with hour.step("kvstore top --once") as shown:
        document = hour.json("top", "--once")
        share = _hit_share(document)
        if not share:
            raise StepError(f"kvstore top shows no hits: {json.dumps(document)[:LOG_CHARS]}")
        shown.append(f"hits in the last minutes: {share:.1%}")
    with hour.step("/metrics") as shown:

        def hit_tokens() -> float:
            text = _get(f"{hour.page}metrics") or ""
            lines = [line for line in text.splitlines() if line.startswith("kvstore_tokens_total{")]
            return sum(float(line.rpartition(" ")[2]) for line in lines if 'kind="hit"' in line)

        shown.append(f'kvstore_tokens_total{{kind="hit"}} {hour.until("hits on /metrics", hit_tokens):.0f}')
        if _get(f"{hour.page}healthz") is None or _get(hour.page) is None:
            raise StepError(f"{hour.page} does not answer with the page, or not with its health")


def judge(hour: Hour, recorder: subprocess.Popen[bytes]) -> None:
    with hour.step("kvstore record, ended") as shown:
        recorder.terminate()
        if recorder.wait(STEP_S_MAX) != 0:
            raise StepError(
                f"kvstore record: exit code {recorder.returncode}: {hour.log('record.log')[-LOG_CHARS:]}"
            )
        lines = (hour.directory / "trace.jsonl").read_text().splitlines()
        if len(lines) < 2 * PROMPTS:
            raise StepError(f"trace.jsonl has {len(lines)} requests, asked were {2 * PROMPTS}")
        shown.append(f"{len(lines)} requests")
    with hour.step("kvstore replay trace.jsonl") as shown:
        results = hour.json("replay", "trace.jsonl", "--policy", "lru,infinite", "--capacity", "100%")[
            "results"
        ]
        best = max(result["hit_ratio"] for result in results)
        if best < 0.4:  # the second half of the requests is the first again
            raise StepError(f"a replay of the same prompts twice hits {best:.1%}")
        shown.append(f"a cache without limits hits {best:.1%}")
    with hour.step("kvstore doctor") as shown:
        found = hour.json("doctor", codes=(0, 1))  # 1: this machine has a problem, which is what it is for
        wrong = [finding["found"] for finding in found["findings"] if finding["level"] == "problem"]
        shown += [f"{len(found['findings'])} things looked at, {len(wrong)} problems", *wrong]


def leave(hour: Hour, daemon: subprocess.Popen[bytes]) -> None:
    with hour.step("kvstore clear --all") as shown:
        cleared = hour.json("clear", "--all", "--yes")["cleared_blocks"]
        if not cleared:
            raise StepError("nothing was cleared")
        shown.append(f"{cleared} blocks")
    with hour.step("stop, and the memory given back") as shown:
        daemon.terminate()
        if daemon.wait(STEP_S_MAX) != 0:
            raise StepError(
                f"kvstore serve: exit code {daemon.returncode}: {hour.log('serve.log')[-LOG_CHARS:]}"
            )
        # An arena that holds nothing is given back by a clean stop.
        if any(hour.instance in str(row) for row in hour.json("arena", "ls")["arenas"]):
            raise StepError(f"kvstore arena ls: {hour.instance} is still there, and holds nothing")
        shown.append("kvstore arena ls does not have it any more")


def carry_out(hour: Hour) -> None:
    """Every step. Raises StepError."""
    install(hour)
    daemon = serve(hour)
    hour.stack.callback(_forget_arena, hour)
    recorder = hour.start("record.log", "kvstore", "record", "trace.jsonl")
    server, port = engine(hour, "vLLM, with one line of JSON")
    cold = ask(hour, port, "prompts")
    stored(hour)
    with hour.step("the engine is stopped"):
        _end(server)
    server, port = engine(hour, "vLLM again")
    if ask(hour, port, "the same prompts") != cold:
        raise StepError("the answers to the same prompts differ")
    see(hour)
    _end(server)
    judge(hour, recorder)
    leave(hour, daemon)


def _hit_share(document: dict[str, Any]) -> float:
    """The share of hits in the last minutes, by `kvstore top`."""
    (row,) = [row for row in document["hits"] if row["tier"] == "all"]
    return float(row["15_min"] or 0.0)


def _get(url: str) -> str | None:
    """The text that lies there; None where nobody answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, OSError):
        return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _forget_arena(hour: Hour) -> None:
    """However it ended, no memory stays behind; after `leave` there is none."""
    for directory in (Path("/dev/shm"), Path("/run/kvstore/huge")):
        for path in directory.glob(f"kvstore-{hour.instance}.*"):
            path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="what `make dist` has built")
    wheel = parser.parse_args().wheel.absolute()
    if not wheel.is_file():
        print(f"first hour: {wheel}: no such wheel; make dist builds it", file=sys.stderr)
        return 3
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstore-first-hour-") as name, ExitStack() as stack:
        try:
            carry_out(Hour(Path(name), wheel, stack))
        except (StepError, subprocess.TimeoutExpired) as error:
            print(f"first hour: {error}", file=sys.stderr)
            return 1
    print(f"{time.monotonic() - begun_s:6.1f} s  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
