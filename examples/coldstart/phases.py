"""What the demo does, in order.

    a model is made ─▶ published in NA ─▶ preloaded on a node │ kill -9 │ resumed ─▶ into DRAM
                            ├─▶ a start directory on a new node, whose engine loads while the model comes
                            ╰─▶ kvstore mirror ─▶ EU │ NA is switched off │ the same on a new node in EU

After each way to have the model a fresh vLLM process answers the same prompts; its tokens have to be those of the plain directory,
loaded by vLLM's own loader. What a bucket sent is not asked of our own commands: the S3 server's log has a line for each request.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.regions.deployment import SLAB_BYTES, Mirror, kvstore, start
from benchmarks.regions.servers import BUCKET_REGION, S3
from coldstart.disk.filling import STREAMS
from examples.demo.engine import Engine
from examples.demo.engine_process import Job
from examples.demo.model import HEAD_DIM, POSITIONS_MAX, TINY, TRAINING_TEXT, WIDE, make_model
from kvstore.tools.bench.daemon import DaemonError

NAME = "demo"
CHUNKS, MANIFESTS = "models/chunks/", "models/manifests/"
PROMPTS = [f"{name} asks. {TRAINING_TEXT[:200]}" for name in ("Ada", "Blaise")]
OUTPUT_TOKENS = 8
WIDE_BYTES_MIN = 512 << 20  # smaller models have narrow layers, so that they have some
SHARDS = 8
KILL_AT_SHARE = 0.4
WAIT_S_MAX = 900.0
_TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")
_FETCHED = re.compile(r"kvstore: \S+: fetched (.*?)(?:verified|loaded) ([\d,]+) bytes")


@dataclass(slots=True)
class Stage:
    """seconds: what it took; of a load, what vLLM says. sources: bytes by where they came from; of a bucket, what it sent. twice:
    chunks that it sent more than once. ready_s: from an engine's making until it had answered a first prompt."""

    name: str
    seconds: float
    sources: dict[str, int]
    twice: int = 0
    ready_s: float | None = None
    tokens_equal: bool | None = None


class Show:
    """The phases, in an empty directory; results in `stages` and `problems`, as they come."""

    def __init__(
        self, directory: Path, arenas: Path, size_bytes: int, say: Callable[[str], None], real_server: bool
    ) -> None:
        """arenas: a directory in memory. say: takes progress, a line each. real_server: radosgw, where it is installed."""
        self.stages: list[Stage] = []
        self.problems: list[str] = []
        self.server, self.model_bytes = "", 0
        self._directory, self._arenas, self._say = directory, arenas, say
        self._size_bytes, self._real_server = size_bytes, real_server
        self._regions = directory / "regions.toml"
        self._counted: dict[S3, Counter[str]] = {}  # what they had sent before
        self._tokens: list[list[int]] = []

    def carry_out(self) -> None:
        """Processes are gone then, but preloads that engines have begun. Raises DaemonError, ClientError, ServerError, OSError."""
        os.environ["KVSTORE_SOCKET_PATH"] = str(self._directory / "daemon" / "s")  # of ours, while it runs
        with ExitStack() as self._stack:
            plain = self._make()
            self._add(self._engine("plain directory", plain, "auto"), "page cache")
            na, eu = self._open_regions()
            self._publish(plain)
            node = self._preload(na)
            self._add(self._engine("load from NVMe", node), "disk")
            self._through_dram(node)
            self._start(na, "na", "load from the bucket")
            self._mirror(na, eu)
            na.stop()
            self._say("NA is switched off")
            self._start(eu, "eu", "load from EU, NA off")

    def _make(self) -> Path:
        shape = WIDE if self._size_bytes >= WIDE_BYTES_MIN else TINY
        layer = shape.hidden * (3 * shape.intermediate + 2 * HEAD_DIM * (shape.heads + shape.kv_heads))
        shape = shape._replace(layers=max(2, round(self._size_bytes / 4 / layer)))
        self._kv_bytes = (
            10 * shape.layers * shape.kv_heads * HEAD_DIM * POSITIONS_MAX
        )  # one prompt, and a bit
        begun_s = time.monotonic()
        plain = make_model(self._directory, shape, self._size_bytes // SHARDS)
        os.sync()  # nothing of it is written any more while others are measured
        self.model_bytes = sum(path.stat().st_size for path in plain.iterdir())
        self._add(Stage("make", time.monotonic() - begun_s, {}))
        return plain

    def _open_regions(self) -> tuple[S3, S3]:
        na = self._stack.enter_context(S3(self._directory / "s3-na", self._real_server))
        eu = self._stack.enter_context(S3(self._directory / "s3-eu", self._real_server, na))
        self.server = na.name
        text = 'deployment = "coldstart"\nrules = [{from = ["na"], to = ["eu"], what = "weights", models = ["*"]}]\n'
        for region, s3 in (("na", na), ("eu", eu)):
            s3.make_bucket(f"coldstart-{region}")
            text += f'[regions.{region}]\nurl = "s3://coldstart-{region}"\nendpoint = "{s3.endpoint}"\n'
            text += f'bucket_region = "{BUCKET_REGION}"\n'
        self._regions.write_text(text, encoding="utf-8")
        for region in ("na", "eu"):
            kvstore("region", "init", region, "--regions", self._regions)
        self._say(f"{na.name} answers for NA at {na.endpoint}, for EU at {eu.endpoint}")
        return na, eu

    def _publish(self, plain: Path) -> None:
        begun_s = time.monotonic()
        done = self._model("publish", plain, "--name", NAME, *self._in("na"))
        self._add(Stage("publish", time.monotonic() - begun_s, {"page cache": done["put_bytes"]}))

    def _preload(self, na: S3) -> Path:
        """Killed when some of it is on disk, and run again."""
        home = self._directory / "node"
        words = ["preload", NAME, *self._in("na"), f"--set=models.dir={home}"]
        begun_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "model", *map(str, words)], stdout=subprocess.DEVNULL
        )
        self._stack.callback(process.kill)
        enough = KILL_AT_SHARE * self.model_bytes
        self._wait(lambda: process.poll() is not None or _filled_bytes(home) > enough, "a preload", 0.002)
        if process.poll() is not None:
            raise DaemonError("a preload ended before it could be killed: take a larger --size")
        process.kill()
        process.wait()
        killed = Stage("preload, kill -9", time.monotonic() - begun_s, {})
        begun_s = time.monotonic()
        done = self._model(*words)
        resumed = Stage("preload, resumed", time.monotonic() - begun_s, done["by_source"])
        sent_bytes, resumed.twice = self._sent(na, "na")
        killed.sources = {"bucket": sent_bytes - done["by_source"].get("bucket", 0)}
        resumed.sources["there already"] = done["kept_bytes"]
        self._add(killed)
        self._add(resumed, "there already", STREAMS)
        return Path(done["path"])

    def _through_dram(self, node: Path) -> None:
        """The files of a node into its DRAM, and from there."""
        home, slabs = node.parents[2], self.model_bytes // SLAB_BYTES + 2
        more = {"models.dram_bytes": slabs * SLAB_BYTES, "models.dir": str(home)}
        with start(self._directory / "daemon", self._arenas, (slabs + 4) * SLAB_BYTES, more) as daemon:
            begun_s = time.monotonic()
            done = self._model("load", NAME, f"--socket={daemon.socket_path}", f"--set=models.dir={home}")
            self._add(Stage("into DRAM", time.monotonic() - begun_s, done["by_source"]), "disk")
            self._add(self._engine("load from DRAM", node), "DRAM")

    def _start(self, s3: S3, region: str, name: str) -> None:
        """On a new node: the engine starts before anything of the weights is there."""
        home = self._directory / f"new-{region}"
        begun_s = time.monotonic()
        said = kvstore("model", "start", NAME, *self._in(region), f"--set=models.dir={home}")
        stage = Stage("start directory", time.monotonic() - begun_s, {})
        stage.sources["bucket"], stage.twice = self._sent(s3, region)
        self._add(stage)
        stage = self._engine(name, Path(said.decode().strip()))
        self._wait(lambda: any((home / f"models--{NAME}/snapshots").glob("*")), "the preload of an engine")
        sent_bytes, stage.twice = self._sent(s3, region)
        stage.sources = {"bucket": sent_bytes}
        self._add(stage, "bucket")

    def _mirror(self, na: S3, eu: S3) -> None:
        begun_s = time.monotonic()
        with Mirror(self._directory / "mirror", self._regions, "eu"):
            self._wait(lambda: eu.size_bytes("coldstart-eu", MANIFESTS) > 0, "mirroring")
            stage = Stage("mirror to EU", time.monotonic() - begun_s, {})
        stage.sources["bucket"], stage.twice = self._sent(na, "na")
        self._add(stage, "bucket")

    # -- pieces --

    def _engine(self, name: str, model: Path, load_format: str = "kvstore") -> Stage:
        """A fresh one. Raises DaemonError."""
        log = self._directory / f"engine-{len(self.stages)}.log"
        self._say(f"{name}: a fresh engine")
        engine = Engine(log)
        self._stack.callback(engine.kill)
        engine.receive(WAIT_S_MAX)
        begun_s = time.monotonic()
        engine.send(Job(str(model), {}, "", "float32", self._kv_bytes, "Nobody asked this.", 1, load_format))
        engine.receive(WAIT_S_MAX)
        ready_s = time.monotonic() - begun_s
        tokens = [reply.tokens for reply in engine.run(PROMPTS, OUTPUT_TOKENS).replies]
        engine.end()
        self._tokens = self._tokens or tokens
        text = log.read_text(errors="replace")
        took = _TOOK.search(text)
        if took is None:
            raise DaemonError(f"{name}: the engine did not say how long it loaded: {log}")
        sources = {"page cache": self.model_bytes} if load_format == "auto" else _fetched(text)
        return Stage(name, float(took[1]), sources, ready_s=ready_s, tokens_equal=tokens == self._tokens)

    def _add(self, stage: Stage, source: str = "", twice_max: int = 0) -> None:
        """source: where bytes have to come from."""
        self.stages.append(stage)
        self._say(f"{stage.name}: {stage.seconds:.1f} s")
        if stage.tokens_equal is False:
            self.problems.append(f"{stage.name}: the tokens are not those of the plain directory")
        if stage.twice > twice_max:
            self.problems.append(f"{stage.name}: {stage.twice} chunks came twice, allowed are {twice_max}")
        if source and not stage.sources.get(source):
            self.problems.append(f"{stage.name}: nothing came from the {source}")

    def _sent(self, s3: S3, region: str) -> tuple[int, int]:
        """Bytes of chunks that a bucket has sent since this was asked last, and how many chunks more than once."""
        sizes = s3.sizes_bytes(f"coldstart-{region}", CHUNKS)
        total = Counter(s3.reads(f"coldstart-{region}", CHUNKS))
        new = total - self._counted.get(s3, Counter())
        self._counted[s3] = total
        return sum(sizes[name] * times for name, times in new.items()), sum(new.values()) - len(new)

    def _wait(self, done: Callable[[], bool], what: str, poll_s: float = 0.1) -> None:
        give_up_s = time.monotonic() + WAIT_S_MAX
        while not done():
            if time.monotonic() > give_up_s:
                raise DaemonError(f"{what} did not end within {WAIT_S_MAX:g} s")
            time.sleep(poll_s)

    def _model(self, *words: object) -> dict[str, Any]:
        said = kvstore("model", *words, "-o", "json", timeout_s=WAIT_S_MAX)
        return msgspec.json.decode(said, type=dict[str, Any])

    def _in(self, region: str) -> list[object]:
        return ["--region", region, "--regions", self._regions]


def _fetched(log: str) -> dict[str, int]:
    """What the load format says of where bytes were; nothing where it was not used."""
    if not (said := _FETCHED.search(log)):
        return {}
    ways = {"in this node's DRAM": "DRAM", "on this disk": "disk"}
    source = next((name for words, name in ways.items() if words in said[1]), "bucket")
    return {source: int(said[2].replace(",", ""))}


def _filled_bytes(directory: Path) -> int:
    """What is written in files, which have their full length from the start."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            end = 0
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:  # no more, or it moved
                while True:
                    begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
                    end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                    total += end - begin
    return total
