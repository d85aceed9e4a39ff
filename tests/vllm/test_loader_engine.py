"""Models loaded by `--load-format kvstore` in real engines: the same tokens as from the directory, every byte read once."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.coldstart.revisions import Bucket, into_dram, mark
from tests.running import Daemon, Place
from tests.vllm import models
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [prompt(90, 120), prompt(91, 64)]


def published(directory: Path, target: Path) -> Path:
    """A copy of a model as a whole revision."""
    shutil.copytree(directory, target)
    mark(target)
    return target


def tokens(
    engine: EngineHost, directory: Path, load_format: str = "kvstore", **options: Any
) -> list[list[int]]:
    engine.start(None, model=str(directory), load_format=load_format, **options)
    return engine.generate(PROMPTS).tokens


def assert_same_tokens(engine: EngineHost, directory: Path, target: Path, **options: Any) -> Path:
    """From the directory by vLLM's own loader, and from a revision by ours."""
    expected = tokens(engine, directory, "auto", **options)
    revision = published(directory, target)
    assert tokens(engine, revision, **options) == expected
    return revision


def in_shards(directory: Path, target: Path) -> Path:
    """The same model in three files."""
    shutil.copytree(directory, target)
    (target / "model.safetensors").unlink()
    held = load_file(directory / "model.safetensors")
    weight_map = {}
    for number in range(3):
        name = f"model-0000{number + 1}-of-00003.safetensors"
        part = {key: held[key] for key in sorted(held)[number::3]}
        save_file(part, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_one_file_and_loading_again(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """Tokens are those of the directory, before and after weights are loaded again in place."""
    revision = assert_same_tokens(host, model, tmp_path / "m")
    before = host.generate(PROMPTS).tokens
    host.call_workers("reload_weights")
    host.reset_prefix()
    assert host.generate(PROMPTS).tokens == before
    assert revision.is_dir()


def test_shards_and_a_buffer_smaller_than_a_tensor(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """Several files, read through as small a ring as there is."""
    sharded = in_shards(model, tmp_path / "shards")
    assert_same_tokens(
        host, sharded, tmp_path / "m", model_loader_extra_config={"enable_weights_track": True}
    )
    small = {"buffer_bytes": 1 << 20, "threads": 2}
    assert tokens(host, tmp_path / "m", model_loader_extra_config=small) == tokens(host, sharded, "auto")


def test_experts(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """A model whose layers are made of many tensors each."""
    assert_same_tokens(host, models.expert_model(model, tmp_path), tmp_path / "m")


def test_a_draft_model(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """It is loaded by the same format, from its own directory."""
    draft = models.draft_model(model, tmp_path)
    speculation = {
        "method": "draft_model",
        "model": str(published(draft, tmp_path / "d")),
        "num_speculative_tokens": 3,
    }
    assert_same_tokens(host, model, tmp_path / "m", speculative_config=speculation)


def test_weights_quantised_while_they_come(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """Layer by layer to FP8, as vLLM does it on the way."""
    host.fill_gap("compute_in_fp8")
    assert_same_tokens(host, model, tmp_path / "m", quantization="fp8_per_block", dtype="bfloat16")


def in_fp8(directory: Path, target: Path, block: int = 128) -> Path:
    """The same model as DeepSeek publishes its own: in FP8, with a scale for each block of each matrix."""
    import torch
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file as save_tensors

    shutil.copytree(directory, target)
    held, made = load_tensors(directory / "model.safetensors"), {}
    for name, tensor in held.items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape[0] // block, tensor.shape[1] // block
        blocks = tensor.view(rows, block, columns, block)
        scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        made[name] = (blocks / scales[:, None, :, None]).view_as(tensor).to(torch.float8_e4m3fn)
        made[name + "_scale_inv"] = scales
    save_tensors(made, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    config |= {"quantization_config": method, "torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_checkpoint_in_fp8(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """Numbers of one byte, and scales beside them."""
    host.fill_gap("compute_in_fp8")
    assert_same_tokens(host, in_fp8(model, tmp_path / "fp8"), tmp_path / "m", dtype="bfloat16")


@pytest.mark.parametrize("harm", ["flipped", "cut off"])
def test_damaged_files_refuse_the_start(host: EngineHost, model: Path, tmp_path: Path, harm: str) -> None:
    """The engine does not start, and one line of its log says which bytes of which file are wrong."""
    revision = published(model, tmp_path / "m")
    path = revision / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if harm == "flipped" else content[: len(content) // 2])
    before = len(host.log())
    with pytest.raises(AssertionError, match=r"model\.safetensors: "):
        host.start(None, model=str(revision), load_format="kvstore")
    assert re.search(
        r"kvstore: .*model\.safetensors: (bytes \d+ to \d+ are not|\d+ bytes, published)", host.log()[before:]
    )


def test_two_ranks_read_each_byte_once(
    host: EngineHost,
    hosts: Callable[..., EngineHost],
    place: Place,
    serve: Callable[..., Daemon],
    model: Path,
    tmp_path: Path,
) -> None:
    """What they read adds up to the weights, and tokens are those of the directory. Out of DRAM neither reads anything."""
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    expected, revision = tokens(host, model, "auto"), published(model, tmp_path / "m")
    host.stop()
    engine = hosts(VLLM_LOGGING_LEVEL="INFO")
    assert tokens(engine, revision, **options) == expected
    read = re.findall(r"verified ([\d,]+) bytes, ([\d,]+) bytes of them read by this rank", engine.log())
    assert len(read) == 2
    total, shares = int(read[0][0].replace(",", "")), [int(share.replace(",", "")) for _, share in read]
    assert sum(shares) == total and min(shares) > 0
    size_bytes = (revision / "model.safetensors").stat().st_size
    assert 0.99 * size_bytes < total <= size_bytes
    daemon = serve(
        place, *place.arguments, "--set=dram.capacity_bytes=64MiB", "--set=models.dram_bytes=32MiB"
    )
    into_dram(revision, daemon.socket)
    engine.start(daemon.socket, model=str(revision), load_format="kvstore", **options)
    assert engine.generate(PROMPTS).tokens == expected
    loaded = re.findall(r"it was in this node's DRAM .* loaded ([\d,]+) bytes", engine.log())
    assert (
        loaded
        == [f"{sum(tensor.nbytes for tensor in load_file(revision / 'model.safetensors').values()):,}"] * 2
    )


def test_kv_is_shared_with_engines_that_load_otherwise(
    host: EngineHost, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """What an engine stored whose weights came by `auto` is found by one that loads them by `kvstore`, and the other way."""
    revision = published(model, tmp_path / "m")
    asked = [prompt(92, 200)]
    host.start(daemon.socket)
    expected = host.generate(asked).tokens
    host.finish_saves()
    host.start(
        daemon.socket, model=str(revision), load_format="kvstore", model_loader_extra_config={"threads": 2}
    )
    found = host.generate(asked)
    assert (found.tokens, found.cached) == (expected, [192])


def test_from_dram_with_an_adapter_beside_it(
    hosts: Callable[..., EngineHost], place: Place, serve: Callable[..., Daemon], model: Path, tmp_path: Path
) -> None:
    """Tokens, those of an adapter of LoRA, too, and KV are those of the directory; weights are loaded again, with the daemon and
    without one."""
    revision, adapter = published(model, tmp_path / "m"), str(models.lora_adapter(model, tmp_path, "lora", 1))
    options = {"enable_lora": True, "max_lora_rank": 8}
    daemon = serve(
        place, *place.arguments, "--set=dram.capacity_bytes=64MiB", "--set=models.dram_bytes=32MiB"
    )
    host, asked = hosts(VLLM_LOGGING_LEVEL="INFO"), [prompt(94, 200)]
    host.start(daemon.socket, **options)
    expected = host.generate(asked).tokens, host.generate(asked, adapter=("lora", 1, adapter)).tokens
    assert expected[0] != expected[1]
    host.finish_saves()
    into_dram(revision, daemon.socket)
    host.start(daemon.socket, model=str(revision), load_format="kvstore", **options)
    found = host.generate(asked), host.generate(asked, adapter=("lora", 1, adapter))
    assert (found[0].tokens, found[1].tokens) == expected
    assert found[0].cached == found[1].cached == [192]
    assert len(re.findall("it was in this node's DRAM", host.log())) == 1
    host.call_workers("reload_weights")
    assert len(re.findall("it was in this node's DRAM", host.log())) == 2
    daemon.stop(signal.SIGKILL)
    host.call_workers("reload_weights")
    assert "fetched nothing: it was on this disk" in host.log()
    host.reset_prefix()
    assert host.generate(asked).tokens == expected[0]
    first_s = [float(seconds) for seconds in re.findall(r"first token after ([\d.]+) s", host.log())]
    assert len(first_s) == 2 and 0 < first_s[0] < first_s[1]  # one of each engine, since the process began
    metrics = host.metrics()  # whole numbers
    assert metrics["first_tokens"] == 1 and metrics["first_token_seconds"] == pytest.approx(first_s[1], abs=1)


def started(model: Path, path: Path) -> str:
    """A start directory of a model in a bucket; nothing of its weights is on this node."""
    done = Bucket(model, path).start()
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_start_directory_of_tied_embeddings_with_a_head_of_their_own(
    host: EngineHost, model: Path, tmp_path: Path
) -> None:
    """vLLM sees by the headers that the checkpoint has a head: tokens are right though the weights come later."""
    tied = shutil.copytree(model, tmp_path / "tied")
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    expected = tokens(host, tied, "auto")
    assert expected == tokens(host, model, "auto")  # those of the head, not those of the embeddings
    directory = Path(started(tied, tmp_path))
    assert tokens(host, directory) == expected
    assert host.call_workers("reload_weights") is None and host.generate(PROMPTS).tokens == expected


def test_kv_is_known_of_a_model_that_was_still_coming(
    host: EngineHost, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """An engine from a start directory finds what one stored that loaded the same weights from a directory."""
    asked = [prompt(93, 200)]
    host.start(daemon.socket)
    expected = host.generate(asked).tokens
    host.finish_saves()
    host.start(daemon.socket, model=started(model, tmp_path), load_format="kvstore")
    found = host.generate(asked)
    assert (found.tokens, found.cached) == (expected, [192])
