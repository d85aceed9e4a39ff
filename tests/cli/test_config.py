"""The settings: layers, sources, and what is said about a wrong one."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.daemon.config.config import Config, keys, sections, value_of
from kvstore.daemon.config.config_sources import Given, load, variable
from kvstore.errors import ConfigError
from tests.running import kvstore

SAMPLE = Path(__file__).parents[2] / "deploy" / "kvstore.toml"
DEEP = 100_000  # more than any parser goes


def write(path: Path, text: str) -> Path:
    file = path / "kvstore.toml"
    file.write_text(text)
    return file


def problems(file: Path | None = None, environment: dict[str, str] | None = None, *sets: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, sets, environment=environment or {"KVSTORE_CONFIG": ""})
    return caught.value.problems


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """Each later layer replaces the one before, and the winner's place is remembered."""
    file = write(tmp_path, '[dram]\ncapacity_bytes = "1GiB"\nslab_bytes = "8MiB"\nslot_bytes_min = 4096\n')
    environment = {"KVSTORE_DRAM__SLAB_BYTES": "4MiB", "KVSTORE_DRAM__CAPACITY_BYTES": "2GiB"}
    loaded = load(file, ["dram.capacity_bytes=3GiB"], environment=environment)
    dram = loaded.config.dram
    assert (dram.capacity_bytes, dram.slab_bytes, dram.slot_bytes_min) == (3 << 30, 4 << 20, 4096)
    assert dram.huge_pages == "auto"
    assert loaded.given["dram.capacity_bytes"] == Given("3GiB", "flag", "--set")
    assert loaded.given["dram.slab_bytes"] == Given("4MiB", "env", "KVSTORE_DRAM__SLAB_BYTES")
    assert loaded.given["dram.slot_bytes_min"] == Given(4096, "file", f"{file}:4")
    assert "dram.huge_pages" not in loaded.given


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    """$KVSTORE_CONFIG is read when no file is given by flag."""
    file = write(tmp_path, "stop_timeout_s = 3")
    loaded = load(environment={"KVSTORE_CONFIG": str(file)})
    assert (loaded.config.stop_timeout_s, loaded.file) == (3.0, file)


def test_a_relative_file_is_told_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks a daemon where a setting stands is in another directory than it was started in."""
    monkeypatch.chdir(write(tmp_path, "stop_timeout_s = 3").parent)
    for loaded in (load(Path("kvstore.toml"), {}), load(environment={"KVSTORE_CONFIG": "kvstore.toml"})):
        assert loaded.file == tmp_path / "kvstore.toml"
        assert loaded.given["stop_timeout_s"].where == f"{tmp_path}/kvstore.toml:1"


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """A missing file is an error when somebody named it."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "nowhere.toml", environment={})
    assert caught.value.missing_file
    assert caught.value.problems == [f"{tmp_path}/nowhere.toml: no such configuration file"]


def test_an_unknown_key_in_the_file_is_refused_where_it_stands(tmp_path: Path) -> None:
    """File, line, name and the nearest valid name."""
    file = write(tmp_path, '# comment\n[dram]\ncapcity_bytes = "1GiB"\n')
    assert problems(file) == [f"{file}:3: unknown key dram.capcity_bytes: did you mean dram.capacity_bytes?"]


def test_an_unknown_key_of_no_neighbour_lists_what_there_is(tmp_path: Path) -> None:
    """The keys of its section and of no other; of an unknown section, the sections."""
    file = write(tmp_path, "[log]\nzzzzzzzz = 1\n[qqqqqqqq]\nwwwwwwww = 1\n")
    ours, other = problems(file)
    listed = ours.partition("known are ")[2].split(", ")
    assert "log.format" in listed and all(key.startswith("log.") for key in listed)
    assert "log.…" in other and "dram.…" in other and "log.format" not in other


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    """A table that does not exist is not silently skipped, not even when its keys would be valid."""
    file = write(tmp_path, "[drm]\nprefault = true\n")
    assert problems(file) == [f"{file}:2: unknown key drm.prefault: did you mean dram.prefault?"]


def test_a_key_in_place_of_a_table_is_refused(tmp_path: Path) -> None:
    """`dram = 3` is told apart from an unknown key."""
    file = write(tmp_path, "dram = 3\n")
    assert problems(file) == [f"{file}:1: dram is a table: write [dram]"]


@pytest.mark.parametrize("name", ["KVSTORE_DRAM_CAPACITY_BYTES", "KVSTORE_DATADIR", "KVSTORE_X"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    """A mistyped variable stops the start, at the top level too."""
    (line,) = problems(None, {name: "1"})
    assert line.startswith(f"environment: unknown variable {name}: ")


def test_variables_of_kubernetes_are_not_ours() -> None:
    """A Service called "kvstore", or "kvstore-metrics", in the same namespace sets these in every pod."""
    of_services = [
        "SERVICE_HOST",
        "PORT",
        "PORT_80_TCP",
        "PORT_80_TCP_ADDR",
        "PORT_80_UDP_PROTO",
        "SERVICE_PORT_GRPC",
    ]
    names = [f"KVSTORE_{name}" for name in of_services] + [f"KVSTORE_METRICS_{name}" for name in of_services]
    assert load(environment=dict.fromkeys(names, "tcp://10.0.0.1:80")).config == Config()


@pytest.mark.parametrize(
    "name", ["KVSTORE_REPORT__GPU_HOUR_PRISE", "KVSTORE_SOCKET_PORTS", "KVSTORE_DOOR__PORT_MAX"]
)
def test_a_mistyped_variable_is_none_of_kubernetes(name: str) -> None:
    """What merely looks a little like one of theirs is refused all the same."""
    (line,) = problems(None, {name: "1"})
    assert line.startswith(f"environment: unknown variable {name}: ")


def test_an_unknown_set_is_refused() -> None:
    """--set names the nearest key, or says what it wants."""
    assert problems(None, {}, "dram.slabbytes=1") == [
        "--set dram.slabbytes=1: unknown key dram.slabbytes: did you mean dram.slab_bytes?"
    ]
    assert "allowed is KEY=VALUE" in problems(None, {}, "dram.slab_bytes")[0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("dram.capacity_bytes=3GB", "dram.capacity_bytes = \"3GB\": unit 'GB' is ambiguous: write GiB"),
        ("dram.capacity_bytes=1", 'dram.capacity_bytes = "1": allowed are 4MiB to 64TiB'),
        ("dram.slab_bytes=3MiB", 'dram.slab_bytes = "3MiB": allowed are multiples of 2MiB'),
        ("dram.slab_bytes=512MiB", "allowed are 2MiB to 256MiB"),
        ("dram.slot_bytes_min=5000", "allowed are multiples of 4KiB up to dram.slab_bytes"),
        ("dram.capacity_bytes=8MiB", "must hold one slab (dram.slab_bytes = 64MiB)"),
        ("report.currency=", 'report.currency = "": it may not be empty'),
        ("dram.huge_pages=maybe", "should be 'auto', 'on' or 'off'"),
        ("dram.prefault=maybe", "allowed are true and false"),
        ("dram.directory=shm", "not an absolute path"),
        ("nvme.directories=/a,/a", "the same directory is listed twice"),
        ("nvme.directories=/a,b", "not an absolute path"),
        ("nvme.directories=/var/lib/kvstore", "data_dir (/var/lib/kvstore) has files of its own"),
        ("engine.io_threads=0", "allowed are 1 to 256"),
        ("engine.io_threads=many", "should be a valid integer"),
        ("stop_timeout_s=nan", "allowed are 0 to 3600"),
        ("stop_timeout_s=-1", "allowed are 0 to 3600"),
        ("socket_path=/" + "s" * 120, "the kernel allows 107"),
        ("log.level=loud", "should be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(setting: str, says: str) -> None:
    """One line: where, key, value, what is allowed."""
    (line,) = problems(None, {}, setting)
    assert line.startswith(f"--set: {setting.partition('=')[0]} = ")
    assert says in line
    assert "\n" not in line


def test_true_is_no_number(tmp_path: Path) -> None:
    """TOML's `true` is not silently read as one."""
    file = write(
        tmp_path, "stop_timeout_s = true\n[engine]\nio_threads = true\n[dram]\ncapacity_bytes = true\n"
    )
    assert [line.split(" = ")[0] for line in problems(file)] == [
        f"{file}:1: stop_timeout_s",
        f"{file}:5: dram.capacity_bytes",
        f"{file}:3: engine.io_threads",
    ]


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    """Who has three mistakes learns of three."""
    file = write(tmp_path, "stop_timeout = 3\n[dram]\nprefault = 3\n")
    assert len(problems(file, {"KVSTORE_LOG_LEVEL": "info"})) == 3


@pytest.mark.parametrize("content", [b"[dram\n", b"\xff\xfe", b"a = 1\na = 2\n", b"x" * (2 << 20)])
def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Garbage in the file is named with the file, whatever it is."""
    file = tmp_path / "kvstore.toml"
    file.write_bytes(content)
    (line,) = problems(file)
    assert line.startswith(f"{file}: ")
    assert "\n" not in line


def test_lists_come_from_variables_by_commas() -> None:
    """The environment has no arrays: a comma-separated list is one, an empty value is none."""
    loaded = load(environment={"KVSTORE_NVME__DIRECTORIES": "/mnt/a, /mnt/b"})
    assert loaded.config.nvme.directories == (Path("/mnt/a"), Path("/mnt/b"))
    assert load(environment={"KVSTORE_NVME__DIRECTORIES": ""}).config.nvme.directories == ()


def test_the_sample_tells_every_key_with_its_default() -> None:
    """deploy/kvstore.toml is the manual: complete, and what it says of defaults is true."""
    loaded = load(SAMPLE, environment={})
    assert loaded.config == Config()
    assert set(loaded.given) == set(keys())


def test_the_sample_explains_every_key() -> None:
    """Each key of the sample has a comment right above it."""
    lines = SAMPLE.read_text().splitlines()
    for above, line in pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert above.startswith("#"), line


def test_every_key_has_a_variable_of_its_own() -> None:
    """No two keys share an environment variable, and a variable sets its key."""
    assert len({variable(key) for key in keys()}) == len(keys())
    defaults = tomllib.loads(SAMPLE.read_text())
    assert set(defaults) - set(sections()) == {key for key in keys() if "." not in key}
    assert value_of(load(environment={"KVSTORE_STOP_TIMEOUT_S": "7"}).config, "stop_timeout_s") == 7.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a=" + DEEP * "[", "nested too deeply"),
        ("a=" + DEEP * "{a=", "nested too deeply"),
        ("a=" + 10_000 * "9", "too many digits: allowed are 4300"),
        ("stop_timeout_s=0x" + 10_000 * "f", "stop_timeout_s = …: should be a valid number"),
        ("log.level." + ".".join(3000 * "a") + "=1", "log.level = …: should be 'debug'"),
        (f'log.level="{10_000 * "x"}"', "x…: should be 'debug'"),
    ],
    ids=["lists", "tables", "digits", "hex digits", "dots", "text"],
)
def test_a_file_beyond_every_limit_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    """What Python's parser or printer gives up on is a problem of that file, told in one short line."""
    file = write(tmp_path, text)
    (problem,) = problems(file)
    assert problem.startswith(str(file)) and says in problem
    assert len(problem) < 500 and "\n" not in problem
    done = kvstore("config", "check", "--config", file)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvstore: {problem}\n")
