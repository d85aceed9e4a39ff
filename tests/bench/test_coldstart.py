"""`python -m benchmarks.coldstart`: the whole of it with a tiny model. No timing is judged: the machine is not ours alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.coldstart import __main__ as command
from benchmarks.coldstart import child
from benchmarks.coldstart.model import make
from benchmarks.errors import BenchError
from coldstart.published.tree import find_files, header_of, opened

OURS = [name for name, way in command.WAYS.items() if way.module == "ours"]


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting of each way, and an emulator for the bucket."""
    ways = {name: way._replace(settings=way.settings[:1]) for name, way in command.WAYS.items()}
    monkeypatch.setattr(command, "WAYS", ways)
    monkeypatch.setattr("benchmarks.regions.radosgw.is_installed", lambda: False)


def test_all_figures_come_with_their_aims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run prints every figure of ours and of a peer that is here, ratios, aims, conditions, and leaves nothing behind."""
    words = ["--size", "4MiB", "--rounds", "1", "--directory", str(tmp_path), "-o", "json"]
    assert command.main([*words, "--only", *OURS, "safetensors"]) == 0
    document = json.loads(capsys.readouterr().out)
    rates = {figure.name for figure, way in command.RATES.items() if way in (*OURS, "safetensors")}
    ratios = {"preload_ratio", "load_nvme_ratio", "load_nvme_to_safetensors", "load_dram_copy_ratio"}
    for name in (*rates, *ratios, command.ATTACH.name):
        assert document[name] > 0, name
    for figure in command.FIGURES:
        assert document.get(f"{figure.name}_aim") == (figure.aim if figure.name in document else None)
    assert document["bucket_server"] == "moto, on the same cores"
    assert document["s3_raw_setting"] == "CONNECTIONS=4"
    assert document["rounds"] == 1 and 4 << 20 < document["model_bytes"] < 16 << 20
    assert not list(tmp_path.iterdir())


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its line says what to install; what can be measured is."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    words = ["--size", "1MiB", "--rounds", "1", "--directory", str(tmp_path), "--peers", str(environment)]
    assert command.main([*words, "--only", "memcpy", "safetensors"]) == 0
    output = capsys.readouterr()
    assert "memcpy_gbps" in output.out and "safetensors_gbps" not in output.out
    assert "safetensors: left out, torch is not installed: pip install 'safetensors torch'" in output.err


def test_a_way_that_fails_says_why(tmp_path: Path) -> None:
    """What a process has printed before it ended is in the error, and no figure is made up."""
    facts = {"scratch": str(tmp_path), "size_bytes": 1 << 20, "revision": str(tmp_path / "missing")}
    with pytest.raises(BenchError, match=r"(?s)disk_read: .*KeyError: 'THREADS'"):
        child.Child(sys.executable, "ours", "disk_read", facts, {})


def test_the_model_is_made_of_whole_safetensors_files(tmp_path: Path) -> None:
    """Its headers are those of its bytes, and tensors begin chunks: else loading it would not be what is measured."""
    make(tmp_path / "model", 4 << 20)
    for file in find_files(tmp_path / "model").files:
        with opened(file) as fd:
            header = header_of(file, fd)
        assert (header is None) == (file.path == "config.json")
        assert header is None or len(header.tensors) == 4
