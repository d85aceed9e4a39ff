"""docs/python.md: names every public method as the code has it, and its examples run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.client.calls import Calls
from kvstore.client.looking import Looking
from tests.running import Daemon, Place

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
WITHOUT_A_HEADING = {"connected", "instance"}  # properties that another section tells of


def as_written(name: str, member: object) -> str:
    """A method with the names and defaults of its parameters, a property with its name alone."""
    if isinstance(member, property):
        return name
    assert callable(member)
    signature = inspect.signature(member)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return name + str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def test_every_public_method_has_a_heading_with_its_parameters() -> None:
    """The page's headings are the client's public methods and properties, with the parameters that they have."""
    members = {**vars(Looking), **vars(Calls), **vars(Client)}
    members = {name: member for name, member in members.items() if not name.startswith("_")}
    assert set(members) >= WITHOUT_A_HEADING
    expected = {as_written(name, member) for name, member in members.items() if name not in WITHOUT_A_HEADING}
    made = as_written("Client", Client.__init__).replace("<built-in function monotonic>", "time.monotonic")
    headings = {
        code
        for line in re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
        for code in re.findall(r"`(.*?)`", line)
    }
    assert headings == expected | {made}
    assert all(f"`{name}`" in PAGE for name in WITHOUT_A_HEADING)


def test_its_examples_run(
    place: Place, serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's code blocks run one after the other, as they are, on a daemon, and what they assert is true."""
    daemon = serve(place)
    monkeypatch.setenv("KVSTORE_SOCKET_PATH", str(daemon.socket))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 8
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
