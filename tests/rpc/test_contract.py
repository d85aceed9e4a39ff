"""The contract of the gRPC API: its style, its code, its compatibility, its rights and its page."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from kvstore.remote.places import METHODS
from kvstore.tools.rpc.calls import ACCESS
from kvstore.v1 import cache_pb2, models_pb2, nodes_pb2, regions_pb2, reports_pb2, types_pb2
from scripts import grpc_docs
from tests.test_tidy import ROOT

BUF = Path(sys.executable).with_name("buf")
MODULES = (cache_pb2, models_pb2, nodes_pb2, regions_pb2, reports_pb2, types_pb2)
needs_buf = pytest.mark.skipif(
    not BUF.exists(), reason="the wheel buf-bin is for Linux on x86-64; CI has it there"
)
OPERATIONS = {"Operation"}


def buf(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([BUF, *words], cwd=ROOT, capture_output=True, timeout=60)


@needs_buf
def test_the_sources_keep_the_style() -> None:
    """Package, names, requests and answers of their own: what every tool for protobuf expects."""
    run = buf("lint", "proto")
    assert run.returncode == 0, run.stdout.decode()


@needs_buf
def test_the_code_is_that_of_the_sources() -> None:
    """Whatever is in proto/ is in kvstore/v1, and nothing else: `make proto` was run."""
    run = buf("build", "proto", "--exclude-source-info", "-o", "-#format=binpb")
    assert run.returncode == 0, run.stderr.decode()
    sources = {file.name: file for file in FileDescriptorSet.FromString(run.stdout).file}
    for module in MODULES:
        code = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        source = sources[code.name]
        for file in (code, source):
            _forget_json_names(file)
        assert code == source, f"{code.name}: make proto"
    assert {name for name in sources if name.startswith("kvstore/")} == {m.DESCRIPTOR.name for m in MODULES}
    made = {path.name for path in (ROOT / "kvstore/v1").glob("*_pb2.py")}
    assert made == {f"{Path(m.DESCRIPTOR.name).stem}_pb2.py" for m in MODULES}


def _forget_json_names(file: FileDescriptorProto) -> None:
    """One compiler writes those down that follow from the name, the other does not; and marks of its own."""
    file.DiscardUnknownFields()
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")


@needs_buf
def test_nothing_that_was_released_has_changed(tmp_path: Path) -> None:
    """A client of the main branch's API works with this one."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    words = ["git", "-C", str(ROOT), "archive", "main", "proto"]
    run = subprocess.run(words, capture_output=True, timeout=60)
    if run.returncode:
        pytest.skip("main is not known here, or has no API yet")
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        archive.extractall(tmp_path, filter="data")
    found = buf("breaking", "proto", "--against", tmp_path / "proto")
    assert found.returncode == 0, found.stdout.decode()


def needs() -> dict[str, str]:
    """What each call's comment says that it needs."""
    found = {}
    for name in grpc_docs.SERVICES:
        file = grpc_docs.parsed((ROOT / f"proto/kvstore/v1/{name}.proto").read_text(encoding="utf-8"))
        for service in (part for part in file.parts if part.kind == "service"):
            for rpc in service.parts:
                said = re.findall(r"Needs(?::)? (.+)$", rpc.comment)
                assert said, f"{service.name}/{rpc.name}: its comment does not say what it needs"
                found[f"{service.name}/{rpc.name}"] = said[-1].rstrip(".")
    return found


def test_every_call_says_what_it_needs() -> None:
    """Each call is in the server's table of rights, and its comment says what stands there."""
    said = needs()
    assert set(said) == set(METHODS) == {name for name in ACCESS if name.partition("/")[0] in _services()}
    words = {"known": "nothing but a known caller"}
    for name, text in said.items():
        if name == "NodeService/CancelOperation":
            assert text == "what beginning it needed"  # which is more than the table can say
            continue
        wanted = ACCESS[name]
        assert text.split(",")[0] == words.get(wanted, wanted), (
            f"{name}: the comment says {text}, the table {wanted}"
        )


def _services() -> set[str]:
    return {name.partition("/")[0] for name in METHODS}


def test_the_page_is_that_of_the_sources() -> None:
    """docs/grpc.md has each call, message and field with its comment, as they are now."""
    made = grpc_docs.page()
    assert grpc_docs.PAGE.read_text(encoding="utf-8") == made, "make grpc-docs"
    for name in METHODS:
        assert f"### {name.replace('/', '.')}\n" in made


def test_what_the_reference_cannot_read_is_an_error() -> None:
    """A line that the maker of the page does not know is no line that it leaves out."""
    with pytest.raises(ValueError, match="not understood"):
        grpc_docs.parsed("message A {\n  group B = 1 {\n}\n")


def test_the_page_names_every_reason() -> None:
    """docs/grpc.md has each reason that an error may have, under its code."""
    from kvstore.tools.rpc.calls import _CODES

    text = grpc_docs.PAGE.read_text(encoding="utf-8")
    for reason, code in _CODES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {code.name} |"))
        assert reason.upper() in row, f"{code.name}: {reason}"
