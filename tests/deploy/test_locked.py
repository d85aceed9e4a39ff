"""`scripts/locked.py`: packages come from pip's own sources, whoever brings them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import locked
from tests.running import ROOT


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's configuration: all that it is told, but what the machine says to everybody."""
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CERT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path / "pip.conf"


def test_uv_is_told_what_pip_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and the environment, which comes first; lists as uv writes them."""
    file.write_text(
        "[global]\nindex-url = https://one/simple\ncert = /one.pem\nno-index = true\n"
        "extra-index-url = https://two/simple\n    https://three/simple\nfind-links = /wheels\n"
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://mine/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/more")
    told = locked.sources()
    assert (told["UV_DEFAULT_INDEX"], told["SSL_CERT_FILE"]) == ("https://mine/simple", "/one.pem")
    assert told["UV_EXTRA_INDEX_URL"].split()[-2:] == ["https://two/simple", "https://three/simple"]
    links = told["UV_FIND_LINKS"].split(",")
    assert links[0] == "/more" and "/wheels" in links and told["UV_NO_INDEX"] == "true"


def test_a_configuration_that_pip_cannot_read_is_pips_to_say(file: Path) -> None:
    """In its words, without a traceback of ours, and nothing is fetched past it."""
    file.write_text("index-url")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "locked.py", "six==1.17.0"], capture_output=True, text=True
    )
    assert done.returncode and "pip.conf" in done.stderr and "locked.py" not in done.stderr, done.stderr
