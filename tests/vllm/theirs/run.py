"""Runs vLLM's own tests with ours in place of theirs, in a process of their own.

    python -m tests.vllm.theirs.run .cache/vllm-0.32.0 results.json

Their tests are a package called `tests`, as ours are: ours are imported first, and then give up the name.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768,
    "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 10000,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True, "torch_dtype": "float16", "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def main(tree: Path, out: Path, more: list[str]) -> int:
    """Returns pytest's exit status. Without the table being kept, and every test passed, it is not 0."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import pytest
    import vllm

    from tests.vllm.theirs.plugin import Theirs
    from tests.vllm.theirs.table import TABLE, Table

    version = ".".join(vllm.__version__.split(".")[:2])
    table = Table(version, Path(os.environ.get("THEIRS_TABLE", TABLE)))
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry)]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for name in ("opt-125m", "opt-350m"):
            model = Path(scratch, "facebook", name)  # what their tests name, as a path
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
        theirs = Theirs(tree, table, out)
        arguments = [
            f"--rootdir={tree}",
            f"--confcutdir={tree / 'tests/v1/kv_connector'}",  # the one above it wants packages that we have not
            "-q", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore", *more,
            *(str(tree / "tests" / path) for path in table.paths),
        ]  # fmt: skip
        status = int(pytest.main(arguments, plugins=[theirs]))
        os.chdir("/")
    return status


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]))
