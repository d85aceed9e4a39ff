"""The example with an engine runs as it is, but for its timeouts: a busy machine proves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, Daemon, environment
from tests.vllm.engines import PATIENT

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

PATIENTLY = f"""
import runpy, sys
example = runpy.run_path(sys.argv[1])
example["KV_TRANSFER"]["kv_connector_extra_config"] = {PATIENT!r}
example["main"](sys.argv[2])
"""


def test_vllm_single(model: Path, daemon: Daemon, tmp_path: Path) -> None:
    """The second time all whole blocks of the prompt come from the store, and the answer is the same."""
    run = subprocess.run(
        [sys.executable, "-c", PATIENTLY, ROOT / "examples/vllm_single.py", model],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(
            KVSTORE_SOCKET_PATH=str(daemon.socket),
            XDG_CACHE_HOME=str(tmp_path),
            HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE="1",
        ),
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = dict(re.findall(r"^(\w+): (\d+ of \d+) prompt tokens", run.stdout, re.MULTILINE))
    assert found["first"].startswith("0 of ")
    loaded, tokens = map(int, found["second"].split(" of "))
    assert tokens - 128 <= loaded < tokens and loaded > tokens / 2
