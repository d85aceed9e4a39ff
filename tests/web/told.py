"""What a web process could tell the live page, made up: hours of traffic, a sick disk, names that mean harm."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kvstore
from kvstore.protocol.outcomes import ENGINE, HITS, MEANINGS, NAMES
from kvstore.tools import web

PAGE = Path(web.__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
NOW_S = 1_795_100_523.0
GIB = 1 << 30
HIT_NAMES = [NAMES[outcome] for outcome in HITS]
KINDS = {
    name: "engine" if name == NAMES[ENGINE] else "hit" if name in HIT_NAMES else "miss" for name in NAMES
}


def live(**changes: Any) -> dict[str, Any]:
    """An answer of a healthy daemon that has served for hours."""
    tokens = {"engine": 40_000_000, "dram": 310_000_000, "nvme": 120_000_000, "never_seen": 90_000_000}
    rows = [("Llama-3.1-70B", "chat", 1.0), ("Llama-3.1-70B", "search", 0.5), ("Qwen3-8B", "agents", 0.21)]
    return {
        "now_s": NOW_S, "uptime_s": 29_000.0, "version": kvstore.__version__, "instance": "gpu-node-17", "pid": 4242,
        "socket_path": "/run/kvstore/kvstore.sock", "data_dir": "/var/lib/kvstore",
        "health": {"ok": True}, "disks": [disk(0), disk(1)], "adopting": False,
        "problems": [],
        "tokens": [
            {"model": model, "tenant": tenant, "region": "", "lookups": int(300_000 * share), "tokens_asked": 0,
             "tokens": {name: int(n * share) for name, n in tokens.items()},
             "bytes": {"stored": 0, "loaded": 0, "promoted": 0, "demoted": 0}, "prefill_s_saved": 61_000.0 * share}
            for model, tenant, share in rows
        ],
        "tiers": [
            {"name": "dram", "capacity_bytes": 256 * GIB, "used_bytes": 255.1 * GIB, "records": 209_000, "model_bytes": 0},
            {"name": "nvme", "capacity_bytes": 4096 * GIB, "used_bytes": 2710 * GIB, "records": 2_220_000, "model_bytes": 0},
        ],
        "counters": {"evicted_dram": 1_930_211, "evicted_nvme": 0, "corrupt_dram": 0, "corrupt_nvme": 0},
        "sessions": [session(f"vllm rank {n}", n) for n in range(8)], "sessions_total": 8,
        "host": "gpu-node-17", "region_name": "eu-west",
        "holdings": [
            {"model": model, "tenant": tenant, "kinds": 1, "namespaces": 2, "blocks": 9, "dram_bytes": int(100 * GIB * share),
             "nvme_bytes": int(1200 * GIB * share), "asked_blocks": 5, "hit_blocks": 4, "differs": []}
            for model, tenant, share in rows
        ],
        "model_loads": {"count": 2, "seconds": 4.5, "by_source": {"dram": 1 << 30}},
        "namespaces_total": 24,
        "breakers": [breaker(f"{device} {way}") for device in ("nvme0", "nvme1") for way in ("loads", "stores")]
        + [breaker("object loads")],
        "speeds": [speed("nvme0", 0.00031, 5.1), speed("nvme1", 0.00034, 4.9), speed("object", 0.021, 1.2)],
        "queues": [
            {"name": "io_urgent", "length": 3, "limit": 64}, {"name": "io_ordinary", "length": 22, "limit": 256},
            {"name": "loads", "length": 412, "limit": 65_536}, {"name": "demoting", "length": 1204, "limit": 16_384},
            {"name": "tickets", "length": 4096, "limit": 4096}, {"name": "load_waiters", "length": 0, "limit": 4096},
        ],
        "write_budget": None, "region": None, "events": None,
        "door": {"connections": 9, "attached": 8, "accepted": 31, "refused": {}, "frames": {}, "slow": {}},
        "prefixes": [
            {"block_hash": f"{n:02x}66b1302fd09acc" * 4, "model": rows[n % 3][0], "tenant": rows[n % 3][1],
             "tokens": 8192 - 512 * n, "uses": 41_000 // (n + 1), "tokens_saved": 300_000_000 // (n + 1),
             "tiers": ["dram", "nvme"][: 1 + n % 2]}
            for n in range(10)
        ],
        **changes,
    }  # fmt: skip


def session(label: str, number: int) -> dict[str, Any]:
    return {
        "id": number + 1, "label": label, "pid": 4300 + number, "uid": 0, "model": "Llama-3.1-70B", "tenant": "chat", "namespaces": 1,
        "connected_s": 3600.0 + number, "requests": 90_000 * number, "asked_blocks": 1000, "hit_blocks": 100 * number,
        "stored_bytes": number * GIB, "loaded_bytes": 3 * number * GIB, "leases": number % 3,
    }  # fmt: skip


def disk(number: int, **changes: Any) -> dict[str, Any]:
    """Of an NVMe directory that is well."""
    return {
        "level": f"nvme{number}", "directory": f"/mnt/nvme{number}/kvstore", "device": f"/dev/nvme{number}n1",
        "file_system": f"ext4 /dev/nvme{number}n1 at /mnt/nvme{number}", "state": "ok", "problem": "", "todo": "",
        "records": 1_110_000, "used_bytes": 1355 * GIB, "capacity_bytes": 2048 * GIB, "room_bytes": 2048 * GIB, **changes,
    }  # fmt: skip


def breaker(
    name: str, state: str = "closed", trips: int = 0, reason: str = "", retry_in_s: float = 0.0
) -> dict[str, Any]:
    return {"name": name, "directory": "", "state": state, "trips": trips, "reason": reason, "retry_in_s": retry_in_s, "jobs": 0, "oldest_job_s": 0.0}  # fmt: skip


def speed(name: str, latency_s: float, gib_per_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "latency_s": latency_s,
        "bytes_per_s": int(gib_per_s * GIB),
        "waiting_bytes": 0,
        "samples": 900,
    }


def samples(
    span_s: float = 21_600, until_s: float = NOW_S, gap: tuple[float, float] | None = None
) -> list[dict[str, Any]]:
    """Samples of 5 s up to a time. gap: seconds before it, between which nobody was there."""
    chance = random.Random(7)
    told = []
    for n in range(int(span_s / 5)):
        t = until_s - 5 * n
        if gap and gap[1] < until_s - t < gap[0]:
            continue
        wave = 1 + 0.35 * math.sin(t / 900) + 0.12 * chance.random()
        told.append(_sample(t, wave, chance))
    return told[::-1]


def _sample(t: float, wave: float, chance: random.Random) -> dict[str, Any]:
    tokens = {
        "engine": int(22_000 * wave), "dram": int(210_000 * wave), "nvme": int(74_000 * wave * (0.7 + 0.3 * math.sin(t / 400))),
        "shared": int(9_000 * wave * chance.random()), "never_seen": int(52_000 * (wave + 0.1 * chance.random())),
        "evicted_dram": int(6_000 * chance.random()), "evicted_nvme": int(4_000 * chance.random()),
        "slower": int(2_500 * chance.random()), "partial_block": 1_900, "writing": int(800 * chance.random()), "corrupt": 0,
    }  # fmt: skip
    slow = 1 + 0.5 * chance.random()
    gib = wave * GIB
    return {
        "t": t, "s": 5.0, "gap": False, "minute": False, "lookups": int(210 * wave), "asked": sum(tokens.values()),
        "tokens": {name: n for name, n in tokens.items() if n},
        "bytes": {"loaded": int(14 * gib), "stored": int(5 * gib), "promoted": int(4 * gib), "demoted": int(3.4 * gib)},
        "saved_s": 36.0 * wave, "used": {"dram": 250 * GIB, "nvme": 2710 * GIB},
        "requests": {"lookup": [int(210 * wave), 170e-6 * slow, 610e-6 * slow], "acquire": [200, 90e-6 * slow, 350e-6 * slow]},
        "loads": {"nvme0": [90, 0.9e-3 * slow, 4.2e-3 * slow], "nvme1": [88, 1.0e-3 * slow, 5.9e-3 * slow],
                  "object": [6, 31e-3 * slow, 120e-3 * slow]},
        "stores": {}, "loop_delay": [500, 60e-6 * slow, 800e-6 * slow],
    }  # fmt: skip


class Told:
    """What the web process says now; tests change it."""

    def __init__(self, live: dict[str, Any] | None, samples: list[dict[str, Any]]) -> None:
        self.live, self.samples = live, samples
        self.up, self.problem, self.age_s = live is not None, "", 0.0
        self.asked: list[str] = []
        self.nodes: dict[str, Any] = {"nodes": [], "problem": ""}

    def live_json(self) -> dict[str, Any]:
        newest = self.samples[-1] if self.samples else None
        return {
            "up": self.up, "problem": self.problem, "now_s": self.live and self.live["now_s"] + self.age_s, "age_s": self.age_s,
            "scrape_s": 0.0011, "live": self.live, "sample": newest, "price": None, "kinds": KINDS, "meanings": MEANINGS,
        }  # fmt: skip

    def history_json(self, since_s: float) -> dict[str, Any]:
        told = [sample for sample in self.samples if sample["t"] > since_s]
        return {"now_s": NOW_S, "up": self.up, "kept_s": 21_600, "instance": "", "samples": told}


@contextmanager
def served(told: Told) -> Iterator[str]:
    """A web process that tells this. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            told.asked.append(self.path)
            if parts.path == "/live.json":
                self._answer(json.dumps(told.live_json()).encode(), "application/json")
            elif parts.path == "/history.json":
                since_s = float(parse_qs(parts.query).get("since", ["0"])[0])
                self._answer(json.dumps(told.history_json(since_s)).encode(), "application/json")
            elif parts.path == "/nodes.json":
                self._answer(json.dumps(told.nodes).encode(), "application/json")
            else:
                path = PAGE / (parts.path.strip("/") or "index.html")
                self._answer(path.read_bytes(), TYPES[path.suffix])

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Browsers that are closed drop their connections."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
