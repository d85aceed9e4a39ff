"""The demo's own judgement: what passes, what does not, and the model it judges by."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo.corrupt import CORRUPT_BYTES, corrupt_one_record
from examples.demo.engine_process import Reply, Run
from examples.demo.model import LAYERS, make_model
from examples.demo.phases import cached_tokens
from examples.demo.report import Expected, Shown, document, page, problems, table
from kvstore.tools.bench.daemon import DaemonError
from tests.pages import read_page
from tiers import checksum
from tiers.base import Get, Put, Record
from tiers.nvme.device import Device

MIB = 1 << 20
GOOD = Shown("warm", 1000, {"dram": 960, "nvme": 0}, 5.0, True, 0, Expected("dram"))


def run_with(host: int = 0, disk: int = 0, loaded_blocks: int = 0) -> Run:
    """What an engine reports that was promised host and disk tokens and loaded so many blocks."""
    source = "vllm:prompt_tokens_cached_by_source:"
    counters = {source + "host": host, source + "disk": disk, "vllm:kvstore_loaded_blocks": loaded_blocks}
    return Run([Reply(100, 1.0, [1])], counters)


def daemon_with(dram: int = 0, nvme: int = 0, promoted: int = 0) -> dict[str, int]:
    """The daemon's counters, in blocks."""
    return {"acquired_dram": dram, "acquired_nvme": nvme, "promoted": promoted}


def test_a_good_phase_has_no_problem() -> None:
    """A phase with equal output and hits from where they must come from passes."""
    assert problems([GOOD]) == []
    assert document([GOOD])["ok"] is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"outputs_equal": False}, "not that of the cold run"),
        ({"cached_tokens": {"dram": 0, "nvme": 960}}, "no tokens came from dram"),
        ({"cached_tokens": {"dram": 1001, "nvme": 0}}, "more tokens cached than asked for"),
        ({"corrupt_blocks": 1}, "1 corrupt blocks counted, expected 0"),
        ({"expected": Expected()}, "must be empty"),
    ],
)
def test_each_fault_is_a_problem(change: dict[str, object], says: str) -> None:
    """Whatever is wrong in a phase is one line, and the document is not ok."""
    bad = replace(GOOD, **change)  # type: ignore[arg-type]  # the fields vary on purpose
    [problem] = problems([bad])
    assert says in problem
    assert document([bad]) == {**document([bad]), "ok": False, "problems": [problem]}


def test_the_table_has_a_row_a_phase() -> None:
    """Rows and columns fit, and computed is what no tier gave."""
    columns, [row] = table([GOOD])
    assert len(columns) == len(row)
    assert row[columns.index("computed")] == 40


def test_the_page_begins_with_the_table() -> None:
    """Phases and their figures, that faults were provoked, and what went wrong, above the daemon's report."""
    bad = replace(GOOD, name="corrupt <block>", ttft_ms=1234.56, outputs_equal=False)
    answer = {
        "region": "",
        "now_s": 7200.0,
        "gpu_hour_price": 0,
        "since_s": 0.0,
        "until_s": 1.0,
        "holdings": [],
        "currency": "EUR",
        "rows": [],
        "prefixes": [],
    }
    content = page([GOOD, bad], answer, ["it stopped"])
    told = read_page(content)["first"]
    assert told["columns"] == table([GOOD])[0]
    assert [row[0] for row in told["rows"]] == ["warm", "corrupt <block>"]
    assert {1234.6, "DIFFERS"} <= set(told["rows"][1]) and "equal" in told["rows"][0]
    assert told["problems"] == ["corrupt <block>: the output is not that of the cold run", "it stopped"]
    assert "The faults were provoked" in told["note"]
    assert content.index('id="first"') < content.index('id="tiles"')


def test_tokens_are_counted_where_the_engine_says() -> None:
    """Promised, loaded and handed out agree: each tier gets what vLLM reports for its source."""
    tokens = cached_tokens(
        run_with(host=64, disk=32, loaded_blocks=3), daemon_with(dram=2, nvme=1, promoted=1)
    )
    assert tokens == {"dram": 64, "nvme": 32}


def test_promised_tokens_that_did_not_come_do_not_count() -> None:
    """Two of four promised blocks came: the slower tier gets the shorter count."""
    tokens = cached_tokens(
        run_with(host=32, disk=96, loaded_blocks=2), daemon_with(dram=1, nvme=3, promoted=3)
    )
    assert tokens == {"dram": 32, "nvme": 32}


@pytest.mark.parametrize(
    ("run", "daemon"),
    [
        (run_with(host=32, loaded_blocks=2), daemon_with(dram=2)),
        (run_with(host=64, loaded_blocks=2), daemon_with(dram=1)),
        (run_with(disk=64, loaded_blocks=2), daemon_with(nvme=2, promoted=1)),
    ],
    ids=["loaded more than promised", "loaded more than handed out", "more from NVMe than was read"],
)
def test_books_that_disagree_stop_the_demo(run: Run, daemon: dict[str, int]) -> None:
    """A count that the other side does not bear out is an error and not a figure."""
    with pytest.raises(DaemonError):
        cached_tokens(run, daemon)


def test_the_model_is_the_same_everywhere(tmp_path: Path) -> None:
    """Made twice, weights and tokenizer are the same bytes."""
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        digests = [hashlib.sha256((model / name).read_bytes()).hexdigest() for model in (first, second)]
        assert digests[0] == digests[1], name
    assert LAYERS == 4


def opened(path: Path) -> Device:
    """A device whose slots may be taken."""
    device = Device(path, 64 * MIB, 2 * MIB)
    device.open()
    for _ in device.scan():
        continue
    return device


def test_corruption_hits_the_middle_of_the_longest_prefix(tmp_path: Path) -> None:
    """Exactly one record is damaged, in the middle of the longest chain; all others are as they were."""
    chains = {b"a": 3, b"b": 7}
    records: list[tuple[Record, bytes]] = []
    for name, length in chains.items():
        parent = b""
        for number in range(length):
            key = (name * 16 + bytes([number]) * 32)[:48]
            content = bytes([number + ord(name)]) * (CORRUPT_BYTES * 256)
            records.append((Record(key, parent, len(content), checksum.digest(memoryview(content))), content))
            parent = key
    device = opened(tmp_path / "nvme")
    slots = {record.key: device.pool.take(device.slot_bytes(record.size_bytes)) or 0 for record, _ in records}
    items = [(slots[record.key], record, memoryview(content)) for record, content in records]
    assert device.write(items) == [Put.STORED] * 10
    device.close()

    damaged = corrupt_one_record(tmp_path / "nvme", 64 * MIB, 2 * MIB)

    assert damaged.key == records[3 + 3][0].key
    device = opened(tmp_path / "nvme")
    for record, content in records:
        view = memoryview(bytearray(record.size_bytes))
        [(answer, _)] = device.read([(slots[record.key], record.key, view)])
        assert answer is (Get.CORRUPT if record.key == damaged.key else Get.HIT)
        assert answer is Get.CORRUPT or bytes(view) == content
    device.close()


def test_nothing_stored_cannot_be_damaged(tmp_path: Path) -> None:
    """An empty directory is said to be empty, before anything is written."""
    with pytest.raises(DaemonError, match="nothing is stored"):
        corrupt_one_record(tmp_path / "nvme", 64 * MIB, 2 * MIB)
