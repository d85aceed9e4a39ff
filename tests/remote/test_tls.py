"""A node with mutual TLS: who gets in as whom, and what changes without a failed request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import remote
from kvstore.remote import Node
from kvstore.tools.cli import main
from tests.remote.servicer import Asked
from tests.rpc.serving import Serving, serving, until
from tests.running import Place
from tests.security.certificates import Authority, settings, write

TOKEN = "a-token-of-this-test"
ACCESS = f"""
[[grant]]
name = "operator"
roles = ["admin"]
[[grant]]
name = "viewer"
roles = ["read"]
[[grant]]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
label = "program"
roles = ["read"]
"""


class Files:
    """Of a client and of a server, of the same authority."""

    def __init__(self, directory: Path) -> None:
        for name in ("server", "client"):
            (directory / name).mkdir()
        self.authority, self._directory = Authority(), directory
        self.server = write(directory / "server", *self.authority.signed(["node"]), self.authority.pem)
        (directory / "access.toml").write_text(ACCESS)
        (directory / "access.toml").chmod(0o600)
        self.settings = settings(self.server, directory / "access.toml")

    def client(self, name: str) -> dict[str, Path]:
        """A certificate of this name, over what was there."""
        certificate, key, ca = write(
            self._directory / "client", *self.authority.signed([name]), self.authority.pem
        )[:3]
        return {"certificate": certificate, "key": key, "ca": ca}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def served(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    words = [word.removeprefix("--set=") for word in files.settings]
    with serving(Place(tmp_path_factory.mktemp("tls")), *words) as found:
        yield found


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_new_certificate_is_used_without_a_failed_request(served: Serving, files: Files, kind: str) -> None:
    """A client is known by its certificate, and after its files have changed by the new one; no call fails meanwhile."""
    node = Asked(kind, served.target, **files.client("operator"))
    assert node.caller().name == "operator" and "admin" in node.caller().may
    files.client("viewer")
    names = set()

    def has_changed() -> bool:
        names.add(name := node.caller().name)
        return name == "viewer"

    until(has_changed, "the new certificate is used")
    assert names <= {"operator", "viewer"}
    with pytest.raises(remote.NotAllowed, match="needs the right to admin"):
        node.check()
    node.close()


def test_files_that_do_not_fit_are_named(served: Serving, files: Files) -> None:
    """And are no node that does not answer: at the first call; later, as between two files that are replaced, those before count."""
    ours = files.client("operator")
    with Node(served.target, **ours) as node:
        assert node.caller().name == "operator"
        swapped = {**ours, "certificate": ours["key"], "key": ours["certificate"]}
        other = files.authority.signed(["viewer"])[1]
        ours["key"].write_bytes(other)
        for wrong, says in (
            (ours, "not the key of"),
            (swapped, "not PEM that can be used"),
            ({"ca": ours["key"]}, "not certificates in PEM"),
        ):
            with Node(served.target, **wrong) as new, pytest.raises(remote.BadRequest, match=says):
                new.caller()
        node.where.watched._looked_s = float("-inf")  # looks at its files with the next call
        assert node.caller().name == "operator"


def test_who_is_not_known_does_not_get_in(
    served: Serving, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No certificate, one of another authority, none of the access file, a server of another authority: each by its class."""
    ours = files.client("nobody")
    with pytest.raises(remote.NotKnown), Node(served.target, **ours) as node:
        node.caller()
    others = Authority()
    theirs = write(tmp_path, *others.signed(["operator"]), others.pem)
    for certificate, key, ca in (
        (None, None, ours["ca"]),
        (theirs.certificate, theirs.key, ours["ca"]),
        (ours["certificate"], ours["key"], theirs.ca),
    ):
        with pytest.raises((remote.Unreachable, remote.DeadlinePassed)):
            Node(served.target, certificate=certificate, key=key, ca=ca, timeout_s=1).status()
    words = ["--node", served.target, "--node-ca", str(ours["ca"])]
    words += ["--node-cert", str(files.client("viewer")["certificate"]), "--node-key", str(ours["key"])]
    assert main(["fsck", *words]) == 1
    assert "needs the right to admin" in capsys.readouterr().err
    files.client("operator")
    assert main(["fsck", *words]) == 0


def test_a_token_goes_with_a_certificate(served: Serving, files: Files, tmp_path: Path) -> None:
    """Who has a certificate of no grant is known by a token."""
    (tmp_path / "token").write_text(TOKEN)
    with Node(served.target, **files.client("nobody"), token_file=tmp_path / "token") as node:
        assert node.caller().name == "program"
        (tmp_path / "token").write_text("yesterday")
        with pytest.raises(remote.NotKnown):
            node.caller()
