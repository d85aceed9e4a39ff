"""A disk of models that is not mounted is not filled in its stead."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from kvstore.daemon.disks.models_disk import MODELS_DISK, remember_models_disk, wrong_of_models_disk
from tests.coldstart.models import cut_evenly, files_at, made, put
from tests.running import TIMEOUT_S, environment
from tiers.bucket.object_store import open_objects

FILES = {"config.json": b"{}", "w.bin": b"w" * 10_000}


def test_a_mount_that_is_gone(tmp_path: Path) -> None:
    """Nothing is brought to what lies below it, unless models are there, or the directory is another one; what cannot be read is unknown."""
    models, file = tmp_path / "mnt" / "models", tmp_path / MODELS_DISK

    def was_on(mount: Path, directory: Path = models) -> str:
        file.write_text(json.dumps({"directory": str(directory), "mount": str(mount)}))
        return wrong_of_models_disk(tmp_path, models)

    assert wrong_of_models_disk(tmp_path, models) == ""
    remember_models_disk(tmp_path, models)
    assert wrong_of_models_disk(tmp_path, models) == ""
    assert was_on(models) == was_on(models.parent).replace(f"{models.parent} any", f"{models} any") != ""
    assert f"models.dir {models}: nothing is mounted at {models} any more" in was_on(models)
    assert was_on(Path("/")) == was_on(models, tmp_path) == ""
    (models / "models--a").mkdir(parents=True)
    assert was_on(models) == ""
    file.write_text("damaged")
    assert wrong_of_models_disk(tmp_path, models) == ""


def test_what_a_daemon_starts_fills_no_disk_below(tmp_path: Path) -> None:
    """It remembers where models came to, and ends with one line, and nothing made, where that is not mounted."""
    (tmp_path / "bucket").mkdir()
    asyncio.run(put(open_objects(f"file://{tmp_path}/bucket"), *made(FILES, cut_evenly(FILES, 3000), "tiny")))

    def child(models: Path) -> tuple[int, str]:
        """As `kvstore.daemon.beside.preloading` starts it."""
        words = ["tiny", "--child", f"--to=file://{tmp_path}/bucket", f"--set=data_dir={tmp_path}"]
        with subprocess.Popen(
            [sys.executable, "-m", "kvstore", "model", "preload", *words, f"--set=models.dir={models}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            assert process.stderr is not None
            return process.wait(TIMEOUT_S), process.stderr.read()

    assert child(tmp_path / "a") == (0, "")
    assert files_at(tmp_path / "a" / "models--tiny" / "snapshots" / "r1") == FILES
    assert json.loads((tmp_path / MODELS_DISK).read_text())["directory"] == f"{tmp_path}/a"
    (tmp_path / MODELS_DISK).write_text(json.dumps({"directory": f"{tmp_path}/b", "mount": f"{tmp_path}/b"}))
    code, said = child(tmp_path / "b")
    assert code == 1 and "nothing is mounted at" in said and said.count("\n") == 1
    assert not (tmp_path / "b").exists()
