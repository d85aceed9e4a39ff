"""Rules about our own source that a machine can check; each with what to do instead.

The rooms and packages and who may know whom are those of docs/architecture.md; everything here reads files with `ast` and
imports nothing, except for the tests that measure what an import drags in.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("connectors", "kvstore", "coldstart", "replication", "tiers")  # imports go downwards only
OTHERS = ("tests", "benchmarks", "scripts", "examples")
# The packages of a room, low to high: each may import those before it, and the modules at the room's root.
PACKAGES = {
    "kvstore": (
        "protocol", "client", "security", "v1", "remote", "index", "events", "policies", "retention", "ledger", "health", "residency",
        "movement", "durable", "commands", "engine", "door", "daemon", "tools",
    ),
    "kvstore.tools": ("replay", "pages", "web", "rpc", "doctor", "bench", "cli"),
    "coldstart": ("published", "disk", "loading", "fleet"),
    "replication": ("formats", "keeper", "catalogue", "erasure", "feed", "models", "audit", "region", "mirror"),
    "tiers": ("nvme", "dram", "bucket", "packs"),
}  # fmt: skip
ROOT_FILES_MAX = 10
# Of each package, with its folders: about a tenth above what it has. What grows beyond is worth a second thought, and
# usually a cut elsewhere; what has shrunk is lowered.
LINES_MAX = {
    "coldstart": 310,
    "coldstart/disk": 1545,
    "coldstart/fleet": 1285,
    "coldstart/loading": 1500,
    "coldstart/published": 965,
    "connectors": 85,
    "connectors/device": 705,
    "connectors/transfer": 1440,
    "connectors/vllm": 4565,
    "kvstore": 995,
    "kvstore/client": 2545,
    "kvstore/commands": 1425,
    "kvstore/daemon": 5620,
    "kvstore/door": 2395,
    "kvstore/durable": 1830,
    "kvstore/engine": 2190,
    "kvstore/events": 845,
    "kvstore/health": 915,
    "kvstore/index": 1545,
    "kvstore/ledger": 2380,
    "kvstore/movement": 1930,
    "kvstore/policies": 1340,
    "kvstore/protocol": 1315,
    "kvstore/residency": 1595,
    "kvstore/retention": 1380,
    "kvstore/remote": 1445,
    "kvstore/security": 920,
    "kvstore/tools": 125,
    "kvstore/tools/bench": 1075,
    "kvstore/tools/cli": 10070,
    "kvstore/tools/doctor": 1895,
    "kvstore/tools/pages": 120,
    "kvstore/tools/replay": 1195,
    "kvstore/tools/rpc": 2430,
    "kvstore/tools/web": 1740,
    "replication": 815,
    "replication/audit": 1155,
    "replication/catalogue": 1370,
    "replication/erasure": 760,
    "replication/feed": 1545,
    "replication/formats": 2210,
    "replication/keeper": 655,
    "replication/mirror": 2205,
    "replication/models": 485,
    "replication/region": 1475,
    "tiers": 1430,
    "tiers/bucket": 1605,
    "tiers/dram": 1975,
    "tiers/nvme": 1360,
    "tiers/packs": 825,
}
GENERATED = ROOT / "kvstore" / "v1"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800

# Where nothing may be asserted, because everything there comes from outside or must not raise.
NO_ASSERT = ("connectors/", "kvstore/tools/cli/", "kvstore/daemon/config/config", "kvstore/door")

# What lies in a bucket has times of its store's clock (replication/store_clock.py). Who knows what lies there and this machine's, too:
OWN_CLOCKS = {
    "replication/store_clock.py": "is held within what the store says",
    "replication/catalogue/catalogue.py": "until it is told that of its region",
    "kvstore/durable/region_level.py": "until the region is joined",
    "kvstore/daemon/regional.py": "is handed to the store's clock",
    "kvstore/daemon/beside/mirroring.py": "is handed to the store's clock; times for people",
    "kvstore/tools/cli/commands/doctor.py": "of what lies on this machine",
    "kvstore/tools/cli/commands/region_init.py": "when it was made, for people",
    "kvstore/tools/cli/commands/region_erase.py": "until the store was asked; the lower bound of a serial number",
}
KNOW_BUCKETS = (
    *(
        "replication/",
        "coldstart/",
        "kvstore/durable/",
        "kvstore/daemon/regional.py",
        "kvstore/daemon/beside/",
    ),
    *(
        f"kvstore/tools/{what}"
        for what in ("doctor/", "cli/buckets", "cli/commands/region", "cli/commands/model")
    ),
    *("kvstore/tools/cli/commands/warm", "kvstore/tools/cli/commands/doctor"),
)

# Called as written here → what to do instead, and where it is allowed all the same.
FORBIDDEN_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "print": (
        "log, or cli/output.py for what a user asked for",
        ("kvstore/tools/cli/", "kvstore/daemon/service.py"),
    ),
    "input": ("a flag", ()),
    "eval": ("a parser", ()),
    "exec": ("a function", ()),
    "hash": (
        "tiers.checksum or a digest: hash() of bytes differs in every process",
        ("kvstore/index/block.py", "kvstore/index/table.py"),  # of a process's own tables
    ),
    "breakpoint": ("nothing: a leftover", ()),
    "pdb.set_trace": ("nothing: a leftover", ()),
    "pickle.loads": ("msgspec: unpickling runs what it reads", ()),
    "pickle.load": ("msgspec: unpickling runs what it reads", ()),
    "os.system": ("subprocess.run with a list", ()),
    "os._exit": ("sys.exit in the main thread", ("kvstore/tools/doctor/apart.py",)),  # a forked child
    "sys.exit": ("raise, and let cli/__init__.py choose the exit code", ("kvstore/__main__.py",)),
    **dict.fromkeys(
        ("tempfile.mktemp", "tempfile.mkdtemp", "tempfile.TemporaryDirectory"),
        ("tiers.scratch.scratch_directory: a signal while theirs is made leaves it behind", ()),
    ),
    **dict.fromkeys(
        ("loop.connect_read_pipe", "loop.connect_write_pipe"),
        ("loop.add_reader: uvloop closes the descriptor of a file twice", ()),
    ),
    "time.time": (
        "time.monotonic: wall clocks jump",
        (
            *(
                "kvstore/daemon/service.py",
                "kvstore/tools/cli/commands/report.py",
                "kvstore/tools/cli/commands/region_erase.py",
            ),
            "kvstore/daemon/beside/mirroring.py",
        ),
    ),  # hours of reports
    "datetime.now": ("datetime.now(UTC), for people only", ()),
    "datetime.utcnow": ("datetime.now(UTC), for people only", ()),
    "asyncio.get_event_loop": ("asyncio.get_running_loop", ()),
    "logging.warn": ("logging.warning", ()),
    "threading.Timer": ("the daemon's tick", ()),
    "random.seed": ("random.Random(seed), which nobody else draws from", ()),
}

# Who keeps tasks by hand, and why: each looks at their ends.
OWNERS_OF_TASKS = {
    "tiers/together.py": "the group itself",
    "replication/tasks.py": "the owner of tasks itself",
    "kvstore/durable/loop_thread.py": "a loop of its own, which cancels all that runs on it",
    "kvstore/daemon/service.py": "cancelled by its signals",
    "kvstore/daemon/beside/mirroring.py": "cancelled by its signals",
    "kvstore/door/unix.py": "one for each connection, closed with the door",
    "kvstore/tools/beside.py": "cancelled by its signals",
    "kvstore/tools/web/asking.py": "one question, shared by all who ask it",
    "kvstore/tools/web/nodes.py": "one look at the bucket at a time; closed with the server",
    "kvstore/tools/web/running.py": "one for each connection that is being made; of too many the oldest goes",
    "kvstore/tools/web/server.py": "closed with the server",
}

# The event loop's thread runs these: one call that sleeps stops every engine of the node.
NEVER_SLEEPS = (
    "kvstore/engine/engine.py",
    "kvstore/door",
    "kvstore/daemon/service.py",
    "kvstore/residency",
    "kvstore/engine/sessions.py",
)

# Distribution names where they differ from import names.
DISTRIBUTIONS = {
    "botocore": "boto3",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "opentelemetry": "opentelemetry-exporter-otlp-proto-http",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "zmq": "pyzmq",
}
# What an import may need without a line in pyproject: it comes with the engine, whose process it runs in.
WITH_THE_ENGINE = {
    "huggingface_hub",
    "numpy",
    "prometheus_client",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
}

LIGHT_IMPORTS = {
    "kvstore.client": {"kvstore", "msgspec", "tiers", "xxhash"},
    "kvstore.tools.cli": {"kvstore"},
    "connectors": {"connectors"},
    "connectors.vllm_plugin": {"connectors", "kvstore"},
}


def python_files(*rooms: str) -> list[Path]:
    """Our source files below these rooms, generated code left out."""
    found = (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    return [path for path in found if GENERATED not in path.parents]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; `from a import b` gives a and a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write the whole name"
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def called(node: ast.Call) -> str:
    """The call as it is written: `print`, `os.system`."""
    return ast.unparse(node.func)


def starts_with_any(name: str, beginnings: tuple[str, ...]) -> bool:
    return any(name.startswith(beginning) for beginning in beginnings)


def test_imports_go_only_downwards() -> None:
    """No room imports one that stands above it."""
    wrong = []
    for height, room in enumerate(ROOMS):
        above = set(ROOMS[:height])
        for path in python_files(room):
            wrong += [
                f"{relative(path)}:{line}: {name}"
                for line, name in imports_of(path)
                if name.split(".")[0] in above
            ]
    assert not wrong, "\n".join(wrong)


@cache
def modules() -> dict[str, Path]:
    """Our modules by name."""
    return {module_name(path): path for path in python_files(*ROOMS)}


@cache
def arrows() -> set[tuple[str, str]]:
    """(module, module it imports), wherever the import stands: TYPE_CHECKING and functions count, too."""
    known = modules()
    return {
        (importer, name)
        for importer, path in known.items()
        for name in imported_modules(path)
        if name in known and name != importer
    }


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports: `from a import b` is a.b where that is a module, else a."""
    known = modules()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else str(node.module) for name in names)


def height(room: str, module: str) -> int:
    """The place of a module among the packages of its room; -1 at the room's root."""
    package = module.removeprefix(f"{room}.").split(".")[0]
    return PACKAGES[room].index(package) if package in PACKAGES[room] else -1


def test_packages_import_only_downwards() -> None:
    """Inside a room no package imports one that stands above it, and the root imports none."""
    wrong = [
        f"{importer} imports {name}"
        for importer, name in sorted(arrows())
        for room in PACKAGES
        if importer.startswith(f"{room}.") and name.startswith(f"{room}.") and importer != "kvstore.__main__"
        if height(room, name) > height(room, importer)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_its_place() -> None:
    """Each package of a room is in PACKAGES, and few modules stand at the root of kvstore/."""
    for room, packages in PACKAGES.items():
        found = {path.parent.name for path in (ROOT / room.replace(".", "/")).glob("*/__init__.py")}
        assert found == set(packages)
    assert len(list((ROOT / "kvstore").glob("*.py"))) <= ROOT_FILES_MAX


def has_circle(found: set[tuple[str, str]]) -> tuple[str, ...]:
    """The modules of a circle, () if there is none."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for importer, name in found:
        graph.add(importer, name)
    try:
        graph.prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def test_no_circles_between_modules() -> None:
    """No module imports one that imports it, not even for a type."""
    assert not has_circle(arrows()), " <- ".join(has_circle(arrows()))


def test_transfer_and_device_know_no_engine() -> None:
    """What moves bytes for any engine imports neither vLLM nor our connector for it."""
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in python_files("connectors/device", "connectors/transfer")
        for line, name in imports_of(path)
        if name.split(".")[0] == "vllm" or name.startswith("connectors.vllm")
    ]
    assert not wrong, "\n".join(wrong)


def package_of(path: Path) -> str:
    """connectors/vllm, kvstore (what lies at its root), tiers."""
    room, *inner = path.relative_to(ROOT).parts
    deep = 2 if inner[0] == "tools" else 1
    return "/".join([room, *inner[: min(deep, len(inner) - 1)]])


def test_packages_keep_their_size() -> None:
    """No package is longer than its ceiling, and no ceiling is far above its package."""
    lines = Counter[str]()
    for path in python_files(*ROOMS):
        lines[package_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    assert set(lines) == set(LINES_MAX)
    wrong = [
        f"{package}: {count} lines of at most {LINES_MAX[package]}"
        for package, count in lines.items()
        if not count <= LINES_MAX[package] <= 1.25 * count + 50
    ]
    assert not wrong, wrong


def test_connectors_know_the_client_only() -> None:
    """An engine's process loads nothing of the daemon but its client, and of models what loads them."""
    wrong = [
        f"{relative(path)}:{line}: {name}; what a connector needs belongs into kvstore.client"
        for path in python_files("connectors")
        for line, name in imports_of(path)
        if name.split(".")[0] in ROOMS
        and name.split(".")[0] not in ("connectors", "coldstart")
        and name != "kvstore"
        and not name.startswith("kvstore.client")
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_import_no_tests_and_no_benchmarks() -> None:
    """What is shipped does not need what is not shipped."""
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in python_files(*ROOMS)
        for line, name in imports_of(path)
        if name.split(".")[0] in OTHERS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_checked_and_shipped() -> None:
    """mypy checks every room, the benchmarks, the demo and the subscriber; the wheel contains the rooms and nothing else."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert set(tool["mypy"]["packages"]) == {*ROOMS, "benchmarks", "examples.demo", "examples.kv_events"}
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(ROOMS)


def test_functions_fit_a_screen() -> None:
    """No function is longer than 70 lines."""
    long = [
        f"{relative(path)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in python_files(*ROOMS, *OTHERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_files_are_not_too_long() -> None:
    """No file is longer than 800 lines; from 500 on it is a question."""
    sizes = {
        relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in python_files(*ROOMS, *OTHERS)
    }
    long = {name: lines for name, lines in sizes.items() if lines > FILE_LINES_MAX}
    assert not long, f"split: {long}"


def test_every_module_says_what_it_is_for() -> None:
    """Every module of a room opens with a docstring."""
    silent = [relative(path) for path in python_files(*ROOMS) if not ast.get_docstring(tree_of(path))]
    assert not silent, f"no docstring: {silent}"


def test_forbidden_calls() -> None:
    """Calls that have a better replacement are not used."""
    wrong = []
    for path in python_files(*ROOMS):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or called(node) not in FORBIDDEN_CALLS:
                continue
            instead, allowed = FORBIDDEN_CALLS[called(node)]
            if not starts_with_any(relative(path), allowed):
                wrong.append(f"{relative(path)}:{node.lineno}: {called(node)}(): use {instead}")
    assert not wrong, "\n".join(wrong)


def test_who_knows_buckets_goes_by_their_clocks() -> None:
    """This machine's clock is read by nobody who could compare it with times in a bucket, but where it is named why."""
    clocks = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    found = {
        relative(path)
        for path in python_files(*ROOMS)
        if starts_with_any(relative(path), KNOW_BUCKETS)
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in clocks)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and {"time", "time_ns"} & {one.name for one in node.names}
        )
    }
    assert found == set(OWN_CLOCKS), f"use replication.formats.keeping.clock_of: {found ^ set(OWN_CLOCKS)}"


def test_every_task_has_an_owner() -> None:
    """What goes on beside something else belongs to a group that ends it, and hears of its failure: `Group`, `together` and
    `meanwhile`, or `Tasks`; nothing is gathered, where a failure lets the others go on alone, nor is there an
    `asyncio.TaskGroup`, which loses a cancellation."""
    wrong = []
    for path in python_files(*ROOMS):
        if relative(path) in OWNERS_OF_TASKS:
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            receiver = ast.unparse(node.func.value)
            if node.func.attr == "create_task" or (
                receiver == "asyncio" and node.func.attr in ("gather", "ensure_future", "TaskGroup")
            ):
                wrong.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node.func)}")
    assert not wrong, "\n".join(wrong)
    assert all((ROOT / name).is_file() for name in OWNERS_OF_TASKS), "left out without a need"


def test_no_shell_and_no_sleep_in_the_event_loop() -> None:
    """No command goes through a shell, and what the event loop runs never sleeps."""
    wrong = []
    for path in python_files(*ROOMS):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            where = f"{relative(path)}:{node.lineno}"
            if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
                wrong.append(f"{where}: shell=True: pass a list")
            if called(node) == "time.sleep" and starts_with_any(relative(path), NEVER_SLEEPS):
                wrong.append(f"{where}: time.sleep() stops every engine: use the tick")
    assert not wrong, "\n".join(wrong)


def test_no_asserts_about_the_world() -> None:
    """Where input comes from outside, or nothing may raise, there is no assert (python -O removes them)."""
    wrong = [
        f"{relative(path)}:{node.lineno}: raise an error of errors.py instead"
        for path in python_files(*ROOMS)
        if starts_with_any(relative(path), NO_ASSERT)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_unfinished_work() -> None:
    """No debug marks, no stubs, no notes to self; and a silenced linter says why."""
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|NotImplemented" r"Error|pdb\b")
    bare = re.compile(r"#\s*(noqa|type:\s*ignore)(?!.*[A-Za-z]+-?[a-z]*\d*[\])].*|: [A-Z]+\d+ \S).*$")
    wrong = []
    for path in python_files(*ROOMS, *OTHERS):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if marks.search(line) and path != Path(__file__):
                wrong.append(f"{relative(path)}:{number}: {line.strip()}")
            if bare.search(line) and path != Path(__file__):
                wrong.append(f"{relative(path)}:{number}: name the rule and the reason: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_no_paths_of_a_machine() -> None:
    """Nothing we ship names a directory of whoever wrote it."""
    homes = "|".join(("work", "farm", "root", "opt/wheels", "opt/pypi", r"home/\w+", r"Users/\w+"))
    pattern = re.compile(rf"(?<![\w.}}])/({homes})/")
    suffixes = {".py", ".md", ".toml", ".sh", ".lock", ".service", ".json", ".yaml", ".yml", ".txt", ""}
    wrong = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or path.suffix not in suffixes:
            continue
        if (
            (parts[0].startswith(".") and parts[0] != ".ci")
            or "__pycache__" in parts
            or parts[0] in ("dist", "site")
        ):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                wrong.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_every_module_is_used() -> None:
    """Every module is imported by another one, or named where something is loaded by name."""
    from kvstore.tools.cli import COMMANDS, module_of

    files = python_files(*ROOMS)
    used = {name for path in files for _, name in imports_of(path)}
    by_name = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [
            *files,
            ROOT / "pyproject.toml",
            ROOT / "Makefile",
            *sorted((ROOT / "docs").glob("*.md")),
        ]
    )
    for command in COMMANDS:
        module = module_of(command)
        used.add(module.__name__)
        if verbs := getattr(module, "VERBS", None):
            used |= {verbs.module(verb).__name__ for verb in verbs.summaries}
    unused = []
    for path in files:
        name = module_name(path)
        if name in used or path.name in ("__init__.py", "__main__.py"):
            continue
        if not re.search(rf"[\"'` ]{re.escape(name)}[\"'`:, \]]", by_name):
            unused.append(name)
    assert not unused, f"nobody imports these: {unused}"


def test_commands_and_their_modules_agree() -> None:
    """Every command of the registry has its module with add_arguments and run."""
    for path in sorted((ROOT / "kvstore/tools/cli").glob("*.py")):
        defined = {node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef)}
        is_command = "add_arguments" in defined
        registered = f'"{path.stem}":' in (ROOT / "kvstore/tools/cli/__init__.py").read_text(encoding="utf-8")
        assert is_command == registered, f"{relative(path)}: command={is_command} registered={registered}"
        assert not is_command or "run" in defined, f"{relative(path)}: no run()"


@pytest.mark.parametrize("module", sorted(LIGHT_IMPORTS))
def test_light_imports(module: str) -> None:
    """Importing what every engine process imports loads nothing beyond what it names here."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.split(".")[0] for name in answer.stdout.split()}
    foreign = {name for name in loaded if name not in sys.stdlib_module_names} - LIGHT_IMPORTS[module]
    assert not foreign, f"import {module} loads {sorted(foreign)}"
    assert "asyncio" not in loaded, f"import {module} loads asyncio"


def test_tests_without_engines_import_no_engine() -> None:
    """Each process that collects tests imports all heads of their modules: vLLM is loaded inside functions, or in
    tests/vllm, which is left out."""
    wrong = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in python_files("tests")
        if ROOT / "tests/vllm" not in path.parents
        for node in tree_of(path).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and re.search(r"\b(vllm|connectors\.vllm)\b", ast.unparse(node).replace("tests.vllm", ""))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_test_states_its_fact() -> None:
    """Every test opens with a docstring, and no test is skipped or expected to fail for good."""
    wrong = []
    for path in python_files("tests"):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith(
                "test_"
            ):
                continue
            if not ast.get_docstring(node):
                wrong.append(f"{relative(path)}:{node.lineno}: {node.name} states no fact")
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            if "mark.skip(" in decorators or "mark.xfail" in decorators:
                wrong.append(f"{relative(path)}:{node.lineno}: {node.name} proves nothing: {decorators}")
    assert not wrong, "\n".join(wrong)


def proves_something(body: ast.AST, provers: set[str]) -> bool:
    """Whether there is an assert, a raise, pytest.raises, or a call of a helper that has one."""
    for node in ast.walk(body):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call) and called(node).rpartition(".")[2] in provers:
            return True
    return False


def test_every_test_can_fail() -> None:
    """Every test asserts or expects an error, itself or through a helper of the tests."""
    functions = [
        (path, node)
        for path in python_files("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    provers = {"raises", "fail", "warns", "run_state_machine_as_test"}
    while found := {n.name for _, n in functions if proves_something(n, provers)} - provers:
        provers |= found
    hollow = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path, node in functions
        if node.name.startswith("test_")
        and node.name not in provers
        and not any(argument.arg in provers for argument in node.args.args)  # a fixture that proves the books
    ]
    assert not hollow, "\n".join(hollow)


def test_third_party_imports_are_declared() -> None:
    """What the rooms import is a dependency in pyproject.toml, or comes with the engine they run in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = project["dependencies"] + [
        n for extra in project["optional-dependencies"].values() for n in extra
    ]
    declared = {re.split(r"[<>=!~\[;]", name)[0].replace("_", "-").lower() for name in names}
    wrong = []
    for path in python_files(*ROOMS):
        for line, name in imports_of(path):
            root = name.split(".")[0]
            if root in sys.stdlib_module_names or root in ROOMS or root == "_typeshed":
                continue
            distribution = DISTRIBUTIONS.get(root, root).replace("_", "-").lower()
            if distribution not in declared and root not in WITH_THE_ENGINE:
                wrong.append(f"{relative(path)}:{line}: {root}")
    assert not wrong, "\n".join(wrong)


def test_locks_agree() -> None:
    """No package has two pins in requirements/, and every dependency of the project has one."""
    pins: dict[str, set[str]] = {}
    for path in sorted((ROOT / "requirements").glob("*.lock")):
        if path.name == "proto.lock":  # an environment of its own, which is never beside the others
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert version, f"{path.name}: not pinned: {line}"
                pins.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    assert not {name: found for name, found in pins.items() if len(found) > 1}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    missing = [
        name for name in needed if re.split(r"[<>=!~\[;]", name)[0].replace("_", "-").lower() not in pins
    ]
    assert not missing, f"no pin in requirements/: {missing}"


def test_links_between_documents_lead_somewhere() -> None:
    """Every relative link in a Markdown file names a file that exists."""
    broken = []
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{relative(path)}: {target}")
    assert not broken, "\n".join(broken)
