"""Compile caches with a real engine: what one compiled is published, restored elsewhere, and used by the next one, or not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import kvstore
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPT = list(range(5, 37))


@pytest.mark.skipif("PAIRS" not in os.environ, reason="of make soak: PAIRS=rounds")
def test_a_second_engine_says_what_it_did_with_the_first_ones_cache(
    model: Path, hosts: Callable[..., EngineHost], tmp_path: Path
) -> None:
    """The second engine computes the same tokens, reads what was restored, and `--check` says a miss exactly where vLLM itself says
    that it compiled again (as 0.32 does on processors, whose backend it cannot load ahead of time)."""
    (tmp_path / "bucket").mkdir()
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)

    def run(verb: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        place = ("--to", f"file://{tmp_path}/bucket", "--key-file", key, "--path", model)
        return kvstore("model", verb, *words, *place)

    def exported(into: str) -> dict[str, str]:
        done = run("env", "tiny", "--into", tmp_path / into, "-o", "json")
        assert done.returncode == 0, done.stderr
        exports: dict[str, str] = json.loads(done.stdout)["exports"]
        return exports

    def tokens(**extra: str) -> tuple[list[list[int]], str]:
        host = hosts(**extra)
        host.start(None, enforce_eager=False, compilation_config={"mode": 3})
        made = host.generate([PROMPT]).tokens
        host.kill()
        return made, host.log()

    publish = ("publish", model, "--name", "tiny")
    assert run(*publish).returncode == 0
    first = exported("first")
    expected, _ = tokens(**first)
    done = run(*publish, "--with-cache", first["VLLM_CACHE_ROOT"])
    assert done.returncode == 0 and "compile caches are published" in done.stdout, done.stderr
    assert "hit" in run("env", "tiny", "--into", tmp_path / "second").stderr
    second = exported("second")
    assert not Path(second["VLLM_CACHE_ROOT"]).is_relative_to(tmp_path / "first")
    found, log = tokens(**second)
    assert found == expected
    checked = json.loads(run("env", "tiny", "--into", tmp_path / "second", "--check", "-o", "json").stdout)
    assert checked["read"] > 0
    assert checked["hit"] == ("Compiling model again" not in log) and bool(checked["made"]) != checked["hit"]
