"""What explain takes in place of a text: a prefix by its hash; and how it finds the tokenizer of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.tools.cli.commands.explain import place_of_model
from tests.cli.test_explain import BLOCK_TOKENS, RECORD_BYTES, TOKENS, fields, ids, named
from tests.running import Daemon, Place, kvstore


@pytest.fixture
def filled(place: Place, serve: Callable[..., Daemon]) -> Place:
    """Two KV groups of one engine, of which one holds a block less; and another model with the same hashes."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        for number, (count, described) in enumerate(
            [
                (5, fields(group="0")),
                (4, fields(group="1")),
                (2, fields() | {"model": "qwen", "weights": "q"}),
            ],
            1,
        ):
            space = client.namespace(bytes([number]) * 16, RECORD_BYTES, 32, BLOCK_TOKENS, described)
            assert client.put(space, named(TOKENS)[:count], b"", [bytes(RECORD_BYTES)] * count) == count
    return place


def test_a_prefix_is_explained_by_its_hash(filled: Place) -> None:
    """The beginning of a hash says the same as its tokens do; where several engines hold it, one is to be named."""
    whole = named(TOKENS)[3].hex()
    by_hash = kvstore(
        "explain", "--prefix", whole[:10], "--model", "llama", "-o", "json", "--socket", filled.socket
    )
    assert by_hash.returncode == 0, by_hash.stderr
    by_tokens = kvstore(
        "explain", "--tokens", ids(TOKENS[:64]), "--model", "llama", "-o", "json", "--socket", filled.socket
    )
    assert json.loads(by_hash.stdout) == json.loads(by_tokens.stdout)
    assert json.loads(by_hash.stdout)["hit_tokens"] == 64
    both = named(TOKENS)[1].hex()
    done = kvstore("explain", "--prefix", both[:10], "--socket", filled.socket)
    assert done.returncode == 2 and "choose one by --namespace, --model or --tenant" in done.stderr
    done = kvstore("explain", "--prefix", both[:10], "--model", "qwen", "--socket", filled.socket)
    assert done.returncode == 0 and "32 of 32 tokens (100.0 %) would hit" in done.stdout
    for words, code, says in (
        (["--prefix", "ff" * 32], 3, "no tier of this node knows it"),
        (["--prefix", "abcd"], 3, "no known prefix begins so"),
        (["--prefix", "no"], 2, "not a block hash in hex"),
        (["--prefix", "abcd", "--tokens", "1"], 2, "one of them"),
        ([], 2, "one of them"),
    ):
        done = kvstore("explain", *words, "--socket", filled.socket)
        assert (done.returncode, done.stdout) == (code, "") and says in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_model_is_named_as_the_engine_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Its name finds the revision that the cache of Hugging Face calls main; what is not there stays what it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    cached = tmp_path / "cache" / ("hub" if variable == "HF_HOME" else "") / "models--org--name"
    for revision in ("old", "new"):
        (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("new\n")
    assert place_of_model(Path("org/name")) == cached / "snapshots" / "new"
    assert place_of_model(Path("org/other")) == Path("org/other")
    done = kvstore("explain", "a text", "--tokenizer", "org/other", "--socket", "s")
    assert done.returncode == 3 and "no model of that name in the cache of Hugging Face" in done.stderr
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert place_of_model(Path("org/name")) == Path("org/name")
