"""examples/remote and the example of docs/grpc.md run as they are, with a real daemon."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.remote.__main__ import main
from kvstore.ledger.vllm_hash import ALGORITHMS, SEED_FIELD_CHARS
from kvstore.remote import Namespace, Node
from tests.remote.test_real import COLUMNS, HASHES, RECORDS, SPACE
from tests.rpc.serving import Serving, serving
from tests.running import ROOT, Place

# An engine whose hashing is known: the page looks its tokens up.
SEED = hashlib.sha256(ALGORITHMS["sha256"]("0")).hexdigest()[:SEED_FIELD_CHARS]
ENGINE = {"model": "org/page", "tenant": "", "hash": "sha256", "hash seed": SEED}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(Place(tmp_path_factory.mktemp("example"))) as found:
        with Node(found.target) as node:
            node.register_namespace(SPACE)
            node.put_records(SPACE, HASHES[:4], RECORDS[:4])
            node.register_namespace(Namespace(b"n" * 16, 4096, 32, 16, ENGINE))
        yield found


def test_the_example_looks_a_prompt_up(served: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what is held where, and why the rest is not."""
    hashes = ",".join(one.hex() for one in HASHES)
    assert main([served.target, "--hashes", hashes, "--model", "org/model"]) == 0
    said = capsys.readouterr().out
    assert f"knows us as uid {os.getuid()}" in said
    assert f"4 of 6 blocks held, {4 * sum(COLUMNS) >> 10} KiB" in said
    assert "4 blocks: dram (dram)" in said and "in no tier (never_seen)" in said


def test_the_example_says_what_is_wrong(served: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal, of a model too, is one line."""
    for words in (["--preload", "no-such-model"], ["--hashes", "ab", "--model", "nobody"]):
        assert main([served.target, *words]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_the_page_runs(served: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of docs/grpc.md works."""
    (block,) = re.findall(r"```python\n(.*?)```", Path(ROOT / "docs/grpc.md").read_text("utf-8"), re.DOTALL)
    page = block.replace("127.0.0.1:9472", served.target).replace("org/model", ENGINE["model"])
    exec(compile(page, "docs/grpc.md", "exec"), {})
    assert "0 tokens held; the rest: never_seen" in capsys.readouterr().out
