"""What explain takes in place of a text: a prefix by its hash, and messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo.model import make_model
from kvstore.client import Client
from kvstore.tools import cli
from kvstore.tools.cli import CliError
from kvstore.tools.cli.chat import chat_tokens, place_of_model
from tests.cli.test_explain import BLOCK_TOKENS, RECORD_BYTES, TOKENS, fields, ids, named
from tests.running import Daemon, Place, kvstore

TEMPLATE = (
    "{%- for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"
)
ASKED = {
    "messages": [{"role": "user", "content": "which tier held the most blocks? " * 20}],
    "cache_salt": "s",
}


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


# -- chat --


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    made = make_model(tmp_path_factory.mktemp("chat"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_a_chat_request_is_explained(
    place: Place, serve: Callable[..., Daemon], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was stored of the rendered prompt hits, with the salt of the request; other messages do not."""
    serve(place)
    chat = chat_tokens(json.dumps(ASKED), str, model, None)
    assert chat.salt == "s" and len(chat.tokens) > 4 * BLOCK_TOKENS
    hashes = named(chat.tokens, salt="s")
    with Client(place.socket, timeout_s=10) as client:
        space = client.namespace(b"c" * 16, RECORD_BYTES, 32, BLOCK_TOKENS, fields())
        assert client.put(space, hashes, b"", [bytes(RECORD_BYTES)] * len(hashes)) == len(hashes)
    file = place.path / "request.json"
    file.write_text(json.dumps(ASKED))
    words = ["explain", "--tokenizer", str(model), "-o", "json", "--socket", str(place.socket), "--chat"]
    done = kvstore(*words, "-", stdin=file.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    documents = [json.loads(done.stdout)]
    for word in (
        str(file),
        f"@{file}",
        file.read_text(),
    ):  # here: a process loads the tokenizer for ten seconds
        assert cli.main([*words, word]) == cli.OK
        documents.append(json.loads(capsys.readouterr().out))
    for document in documents:
        assert (document["tokens"], document["hit_tokens"]) == (len(chat.tokens), len(hashes) * BLOCK_TOKENS)
    assert cli.main([*words, json.dumps([{"role": "user", "content": "other"}])]) == cli.OK
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == 0


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ("[", "not valid JSON"),
        ("[]", "allowed are messages"),
        ('[{"content": "x"}]', "allowed are messages"),
        ('{"prompt": "x"}', "allowed are messages"),
        ('{"messages": [{"role": "u", "content": "x"}], "tools": [{}]}', "ask the engine's /tokenize"),
        ('{"messages": [{"role": "u", "content": "x"}], "chat_template_kwargs": 1}', "not an object"),
        ('[{"role": "u", "content": [{"type": "image_url"}]}]', "images, audio or files are not covered"),
        ('[{"role": "u", "content": null}]', "the template refuses it"),
    ],
)
def test_what_is_no_chat_is_one_line(model: Path, chat: str, says: str) -> None:
    """Each with what is allowed; nothing of it is a traceback."""
    with pytest.raises(CliError, match=says) as error:
        chat_tokens(chat, str, model, None)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_tokenizer_without_a_template(tmp_path: Path, model: Path) -> None:
    """It is said, and --chat-template helps; a directory or file that is not there is named."""
    bare = make_model(tmp_path)
    chat = json.dumps(ASKED)
    with pytest.raises(CliError, match="has no chat template: give one as --chat-template FILE"):
        chat_tokens(chat, str, bare, None)
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    assert chat_tokens(chat, str, bare, file) == chat_tokens(chat, str, model, None)
    for tokenizer, template in ((tmp_path / "nowhere", None), (bare, tmp_path / "nothing")):
        with pytest.raises(CliError, match=r"no such directory|No such file") as error:
            chat_tokens(chat, str, tokenizer, template)
        assert error.value.exit_code == 3
    with pytest.raises(CliError, match="needs --tokenizer"):
        chat_tokens(chat, str, None, None)


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
    with pytest.raises(CliError, match="no model of that name in the cache of Hugging Face") as error:
        chat_tokens(json.dumps(ASKED), str, Path("org/other"), None)
    assert error.value.exit_code == 3
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert place_of_model(Path("org/name")) == Path("org/name")
