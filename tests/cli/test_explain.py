"""Explain: the hashes are vLLM's, the right namespaces are asked, and what is told is what would happen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.engine.engine import STATUS_NAMESPACES_MAX
from kvstore.ledger.explain import Unclear, choose, engine_of, judged, runs
from kvstore.ledger.prompts import SEEDS, root
from kvstore.ledger.vllm_hash import ALGORITHMS, DEFAULT_SEED, block_hashes, cbor, none_hash
from kvstore.protocol import outcomes
from tests.running import Daemon, Place, kvstore

BLOCK_TOKENS = 16
TOKENS = [(7 * n + 300 * (n % 3)) % 50_000 for n in range(100)]
RECORD_BYTES = 20_000

# What vLLM 0.32 makes of TOKENS[:32] with a salt, blocks of 16: its second hash.
KNOWN = {
    "sha256": "1abf78efd543e7d5fb2c62365e72c72f385c5a5a5adc31cb591197260dae3af3",
    "sha256_cbor": "dcc052eb97e3d276847814ee7291978a848feb18410d77ecf65de8db77aa717d",
}


def fields(algorithm: str = "sha256", seed: str = DEFAULT_SEED, **more: str) -> dict[str, str]:
    """As the connector names a namespace, as far as explaining needs it."""
    digest = hashlib.sha256(ALGORITHMS[algorithm](seed)).hexdigest()[:32]
    of_a_group = {"shards": "[0, 1]", "group": "0"}
    return {"model": "llama", "tenant": "", "hash": algorithm, "hash seed": digest, **of_a_group, **more}


def named(
    tokens: list[int], algorithm: str = "sha256", seed: str = DEFAULT_SEED, salt: str = ""
) -> list[bytes]:
    return block_hashes(algorithm, ALGORITHMS[algorithm](seed), tokens, BLOCK_TOKENS, salt)


@pytest.mark.parametrize("algorithm", KNOWN)
def test_hashes_are_those_that_vllm_made(algorithm: str) -> None:
    """A vector from vLLM itself: seed, salt, chain and serialisation."""
    assert named(TOKENS[:40], algorithm, salt="acme")[1].hex() == KNOWN[algorithm]


@pytest.mark.vllm
@pytest.mark.parametrize("salt", ["", "acme", "cache_salt"])
@pytest.mark.parametrize("seed", [None, "0", "a longer seed"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_are_those_that_vllm_makes(
    algorithm: str, seed: str | None, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed vLLM, its own functions, a request of its own: the same bytes for every block."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    if seed is None and "xxhash" in algorithm:
        seed = "1"  # without one it starts from random bytes
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, function)
    params = SamplingParams(max_tokens=1)
    request = Request("r", list(TOKENS), params, None, cache_salt=salt or None, block_hasher=hasher)
    digest = hashlib.sha256(kv_cache_utils.NONE_HASH).hexdigest()[:32]
    parent = none_hash(algorithm, digest, [seed or DEFAULT_SEED])
    assert parent == kv_cache_utils.NONE_HASH
    assert len(request.block_hashes) == len(TOKENS) // BLOCK_TOKENS
    assert block_hashes(algorithm, parent, TOKENS, BLOCK_TOKENS, salt) == request.block_hashes


def test_cbor_is_canonical() -> None:
    """Against the library, at every border between sizes."""
    library = pytest.importorskip("cbor2")
    borders = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -1, -25]
    for value in (
        *borders,
        b"",
        b"x" * 300,
        "",
        "ü" * 20,
        None,
        (),
        (b"p", tuple(borders), (("cache_salt", "s"),)),
    ):
        assert cbor(value) == library.dumps(value, canonical=True)


def test_a_seed_is_never_believed() -> None:
    """A NONE_HASH counts only if the namespace's digest of it agrees."""
    digest = fields(seed="7")["hash seed"]
    assert none_hash("sha256", digest, ["0", DEFAULT_SEED]) is None
    assert none_hash("sha256", digest, ["0", "7"]) == ALGORITHMS["sha256"]("7")


# -- which namespaces --


def space(digest: str, blocks: int = 1, **named_fields: str) -> dict[str, Any]:
    return {"digest": digest * 32, "blocks": blocks, "block_tokens": 16, "fields": fields(**named_fields)}


def test_groups_of_one_engine_are_asked_together() -> None:
    """Namespaces that differ in group and what follows from these belong together; others do not."""
    groups = [space(str(n), group=str(n), layers=str(n)) for n in range(4)]
    others = [space("8", model="qwen", weights="q"), space("9", tenant="acme"), space("a", epoch="1")]
    assert engine_of(groups[2], [*others, *groups]) == groups
    assert choose([*others[:2], *groups], "", "llama", "") == groups
    with pytest.raises(Unclear, match=r"a{8} \(model llama, tenant none, epoch 1, 1 blocks\)"):
        choose([*others, *groups], "", "llama", "")


def test_adapters_of_an_engine_are_asked_when_they_are_named() -> None:
    """A prompt is meant without an adapter, where nothing else is said and there is anything without."""
    plain, *adapted = space("1"), space("2", adapter="x"), space("3", adapter="y")
    assert choose([*adapted, plain], "", "", None) == [plain]
    assert choose([*adapted, plain], "3", "", None) == [adapted[1]]
    assert choose([adapted[0]], "", "", None) == [adapted[0]]


def test_of_two_alike_engines_the_chosen_one_is_asked() -> None:
    """Another attention backend is another engine, though its identity is the same."""
    first = [space(str(n), group=str(n), attention="FLASH") for n in range(2)]
    second = [space(str(n + 5), group=str(n), attention="TRITON") for n in range(2)]
    assert engine_of(first[1], [*second, *first]) == first
    assert choose([*first, *second], "6", "", None) == second


def test_what_is_not_clear_is_said_with_the_choices() -> None:
    """No such model, several engines, no namespace at all: one line that names what there is."""
    spaces = [space("1"), space("2", tenant="acme"), space("3", model="qwen", weights="q")]
    for chosen in (("", "gpt", None), ("ff", "", None), ("", "llama", None)):
        with pytest.raises(Unclear, match=r"11111111 \(model llama, tenant none, .*1 blocks\)"):
            choose(spaces, *chosen)
    assert choose(spaces, "", "", "acme") == [spaces[1]]
    assert choose(spaces, "", "QWEN", None) == [spaces[2]]
    with pytest.raises(Unclear, match="knows none"):
        choose([], "", "", None)


def test_a_block_hits_only_if_it_hits_everywhere() -> None:
    """The slowest tier counts; behind a block that one namespace misses nothing hits."""
    dram, nvme, gone, never = outcomes.HIT_DRAM, outcomes.HIT_NVME, outcomes.EVICTED_NVME, outcomes.NEVER_SEEN
    assert judged([[dram, dram, dram, never]]) == [dram, dram, dram, never]
    assert judged([[dram, dram, dram, dram], [nvme, dram, gone, never]]) == [nvme, dram, gone, never]
    assert judged([[dram, gone, dram]]) == [dram, gone, gone]


def test_runs_cover_every_token_once() -> None:
    """Runs follow each other without gap; the tail is a run of its own."""
    found = runs([1, 1, 2, 3, 3], 16, 87)
    assert [(run.outcome, run.first_block, run.last_block) for run in found] == [
        ("dram", 0, 1), ("nvme", 2, 2), ("never_seen", 3, 4), ("partial_block", 5, 5)
    ]  # fmt: skip
    assert [run.first_token for run in found] == [0, 32, 48, 80] and sum(run.tokens for run in found) == 87
    assert runs([], 16, 0) == []


# -- with a daemon --


@pytest.fixture
def filled(place: Place, serve: Callable[..., Daemon]) -> Iterator[Place]:
    """A daemon where two KV groups stored four blocks of TOKENS, and only one of them the fifth."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        for group, count in (("0", 5), ("1", 4)):
            digest = bytes([int(group) + 1]) * 16
            described = fields(group=group)
            rank = client.namespace(digest, RECORD_BYTES, 32, BLOCK_TOKENS, described)
            assert client.put(rank, named(TOKENS)[:count], b"", [bytes(RECORD_BYTES)] * count) == count
    return place


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def test_a_stored_prompt_hits_and_the_rest_says_why(filled: Place) -> None:
    """Two groups together: four blocks hit, the others were never seen there, the tail is no block."""
    done = kvstore("explain", "--tokens", ids(TOKENS), "-o", "json", "--socket", filled.socket)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        "model", "tenant", "namespaces", "tokens", "block_tokens", "hit_tokens", "summary", "blocks", "runs"
    }  # fmt: skip
    assert [block["outcome"] for block in document["blocks"]] == ["dram"] * 4 + ["never_seen"] * 2
    assert [block["tiers"] for block in document["blocks"]] == [["dram"]] * 4 + [[]] * 2
    assert (document["hit_tokens"], document["tokens"], len(document["namespaces"])) == (64, 100, 2)
    assert document["blocks"][3]["hash"] == named(TOKENS)[3].hex()
    assert [run["outcome"] for run in document["runs"]] == ["dram", "never_seen", "partial_block"]


def test_the_table_merges_blocks_and_ends_with_a_sentence(filled: Place, tmp_path: Path) -> None:
    """A prompt from a file, or given in place; the sentence says how much hits, and why not more."""
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(TOKENS))
    for words in (["--tokens", f"@{file}"], [ids(TOKENS)], [f"@{file}"]):
        done = kvstore("explain", *words, "--socket", filled.socket)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert any(line.split()[:4] == ["0-3", "0-63", "64", "dram"] for line in lines)
        assert lines[-1] == (
            "64 of 100 tokens (64.0 %) would hit; from token 64 on they would not, "
            "for the reason never_seen (not seen before, or longer ago than is remembered)."
        )


def test_explaining_counts_nothing(filled: Place) -> None:
    """It is a question about the cache and not one to it."""
    kvstore("explain", "--tokens", ids(TOKENS), "--socket", filled.socket)
    done = kvstore("report", "-o", "json", "--socket", filled.socket)
    assert json.loads(done.stdout)["totals"]["tokens"] == 0


def test_another_salt_misses(filled: Place) -> None:
    """The salt is in the first hash, and so in all."""
    done = kvstore("explain", "--tokens", ids(TOKENS), "--salt", "x", "-o", "json", "--socket", filled.socket)
    assert json.loads(done.stdout)["hit_tokens"] == 0


def test_a_text_goes_through_the_tokenizer(filled: Place, tmp_path: Path) -> None:
    """Words become ids by the model's own tokenizer.json; a file that is none is one line."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{token}": token for token in sorted(set(TOKENS))}
    model = tokenizers.models.WordLevel(vocab={**words, "?": 60_000}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = " ".join(f"w{token}" for token in TOKENS)
    done = kvstore("explain", text, "--tokenizer", tmp_path, "-o", "json", "--socket", filled.socket)
    assert json.loads(done.stdout)["hit_tokens"] == 64, done.stderr
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    done = kvstore("explain", text, "--tokenizer", broken, "--socket", filled.socket)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "give a PROMPT, --tokens, --prefix or --engines"),
        (["hello", "--tokens", "1"], 2, "give a PROMPT, --tokens, --prefix or --engines"),
        (["hello"], 2, "a text needs --tokenizer"),
        (["hello", "--tokenizer", "/none"], 3, "no such file"),
        (["--tokens", "1,two"], 2, "'two' is none"),
        (["--tokens", "99999999999"], 2, "is none"),
        (["--tokens", ""], 2, "argument --tokens: is empty"),
        (["@/none"], 3, "/none: No such file"),
        (["--tokens", "1", "--model", "gpt"], 3, "no namespace like that; known: 01010101 (model llama"),
        (["--tokens", "1", "--hash-seed", "5"], 2, "--hash-seed 5 is not the engine's"),
    ],
)
def test_what_is_wrong_is_one_line(filled: Place, words: list[str], code: int, says: str) -> None:
    """Wrong usage and what is not there: one line, nothing on stdout, no traceback."""
    done = kvstore("explain", *words, "--socket", filled.socket)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_an_engine_with_a_seed_of_its_own(place: Place, serve: Callable[..., Daemon]) -> None:
    """Its PYTHONHASHSEED is asked for, and found to be right."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        rank = client.namespace(b"s" * 16, RECORD_BYTES, 32, BLOCK_TOKENS, fields(seed="own"))
        client.put(rank, named(TOKENS, seed="own"), b"", [bytes(RECORD_BYTES)] * 6)
    words = ["--tokens", ids(TOKENS), "--socket", str(place.socket)]
    done = kvstore("explain", *words)
    assert done.returncode == 2 and "has a hash seed of its own" in done.stderr
    for extra, environment in ((["--hash-seed", "own"], {}), ([], {"PYTHONHASHSEED": "123"})):
        done = kvstore("explain", *words, *extra, **environment)
        assert ("96 of 100" in done.stdout) == bool(extra), done.stderr


def test_groups_with_blocks_of_other_sizes_are_asked_in_tokens(
    place: Place, serve: Callable[..., Daemon]
) -> None:
    """A group with blocks twice as long has every second hash; a token hits where both have it."""
    serve(place)
    fine = named(TOKENS)
    with Client(place.socket, timeout_s=10) as client:
        small = client.namespace(b"1" * 16, RECORD_BYTES, 32, 16, fields(group="0"))
        large = client.namespace(b"2" * 16, RECORD_BYTES, 32, 32, fields(group="1"))
        client.put(small, fine[:5], b"", [bytes(RECORD_BYTES)] * 5)
        client.put(large, fine[1:6:2], b"", [bytes(RECORD_BYTES)] * 3)
    done = kvstore("explain", "--tokens", ids(TOKENS), "-o", "json", "--socket", place.socket)
    document = json.loads(done.stdout)
    assert (document["block_tokens"], document["hit_tokens"]) == (32, 64), done.stderr
    assert [block["outcome"] for block in document["blocks"]] == ["dram", "dram", "never_seen"]


@pytest.mark.parametrize("spec", ["SlidingWindowSpec(…)", "MambaSpec(…)"])
def test_groups_that_need_only_the_end_are_not_judged(
    place: Place, serve: Callable[..., Daemon], spec: str
) -> None:
    """Of a window or a state the blocks before it are not there, and no miss; the sentence says so."""
    serve(place)
    hashes = named(TOKENS)
    with Client(place.socket, timeout_s=10) as client:
        whole = client.namespace(b"1" * 16, RECORD_BYTES, 32, 16, fields(group="0"))
        end = client.namespace(b"2" * 16, RECORD_BYTES, 32, 16, fields(group="1", spec=spec))
        client.put(whole, hashes[:5], b"", [bytes(RECORD_BYTES)] * 5)
        client.put(end, hashes[4:5], hashes[3], [bytes(RECORD_BYTES)])
    done = kvstore("explain", "--tokens", ids(TOKENS), "-o", "json", "--socket", place.socket)
    document = json.loads(done.stdout)
    assert document["hit_tokens"] == 80, done.stderr
    assert document["summary"].endswith(
        ". Sliding windows and recurrent states need only the end of a prefix; they are not judged here."
    )


def test_names_cannot_steer_a_terminal(place: Place, serve: Callable[..., Daemon]) -> None:
    """A model called with escape codes and line ends is one harmless line."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        rank = client.namespace(b"1" * 16, RECORD_BYTES, 32, 16, fields(model="\x1b[31mred\nline"))
        client.put(rank, named(TOKENS)[:1], b"", [bytes(RECORD_BYTES)])
    for words in (["--model", "gpt"], []):
        done = kvstore("explain", "--tokens", ids(TOKENS), *words, "--socket", place.socket)
        told = done.stdout + done.stderr
        assert "\ufffd[31mred\ufffdline" in told and "\x1b" not in told


def test_a_namespace_that_says_nothing_is_named() -> None:
    """Of an engine that does not tell how it hashes nothing can be explained."""
    with pytest.raises(Unclear, match="an engine that does not say how it hashes"):
        root({}, SEEDS)


def test_an_engine_is_found_among_many(place: Place, serve: Callable[..., Daemon]) -> None:
    """More namespaces than a status lists, and the one that is asked about has the fewest blocks."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        for number in range(STATUS_NAMESPACES_MAX + 5):
            described = fields(tenant=f"t{number}")
            space = client.namespace(number.to_bytes(16, "big"), RECORD_BYTES, 32, BLOCK_TOKENS, described)
            blocks = named(TOKENS)[: 1 if number == 3 else 2]
            assert client.put(space, blocks, b"", [bytes(RECORD_BYTES)] * len(blocks)) == len(blocks)
        assert len(client.list_namespaces()) == STATUS_NAMESPACES_MAX + 5
        assert len({space["digest"] for space in client.list_namespaces()}) == STATUS_NAMESPACES_MAX + 5
    done = kvstore(
        "explain", "--tokens", ids(TOKENS), "--tenant", "t3", "-o", "json", "--socket", place.socket
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hit_tokens"] == BLOCK_TOKENS
