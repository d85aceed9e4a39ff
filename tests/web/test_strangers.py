"""Who reads names on the page: the daemon's user and root; nobody else, whichever path is asked."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.security.identity import Gate
from kvstore.tools.web.strangers import HIDDEN, Askers
from tests.running import Place
from tests.web.asked import Serve, get, until, url_of

STRANGER = 65534
PATHS = (
    "/live.json",
    "/metrics",
    "/healthz",
    "/healthz?o=json",
    "/readyz",
    "/history.json",
    "/nodes.json",
    "/",
)
SECRETS = ("secret-model", "secret-tenant", "secret-label", (b"h" * 32).hex(), (b"b" * 16).hex())


def as_stranger(url: str, path: str) -> bytes:
    """What a process of another user is answered. Needs root."""
    parts = urlsplit(url)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # only what cannot need a lock of a thread that is not here
        try:
            os.setresuid(STRANGER, STRANGER, STRANGER)
            with (
                socket.create_connection((parts.hostname, parts.port), 30) as peer,
                os.fdopen(writing, "wb") as file,
            ):
                peer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                while piece := peer.recv(65536):
                    file.write(piece)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    assert answer.startswith(b"HTTP/1.1 "), answer
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as somebody else")
def test_a_stranger_reads_no_names(place: Place, serve: Serve) -> None:
    """Figures, yes; a model, a tenant, a hash, a label, a directory: no. The daemon's user reads all, and so does everybody with names = all."""
    daemon = serve(place, *place.arguments, "--set=web.listen=127.0.0.1:0")
    url = url_of(daemon)
    with Client(place.socket, timeout_s=10, label="secret-label") as client:
        fields = {"model": "secret-model", "tenant": "secret-tenant"}
        space = client.namespace(b"b" * 16, 4096, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [b"x" * 4096]) == 1
        client.lookup([space], [b"h" * 32], ticket=1, tokens=16)
        wanted = (*SECRETS, str(place.data_dir))
        until(lambda: all(secret in get(url, "/live.json").text for secret in wanted), "our own answer")
        for path in PATHS:
            answer = as_stranger(url, path).decode()
            assert not [secret for secret in (*SECRETS, str(place.path)) if secret in answer], path
        assert 'kvstore_tokens_asked_total{model="model-' in as_stranger(url, "/metrics").decode()


def test_what_to_do_is_shown_unless_it_names_a_directory() -> None:
    """A remedy is the same everywhere; one that names where a disk is mounted is for who may read names."""
    for fix, shown in (
        ("make room on it, or set nvme.capacity_bytes to 1GiB", True),
        ("somebody may write keeper/ there: look at their problems", True),
        ("mount its disk; or kvstore disks --accept /data/acme, to take what is there now", False),
        ("kvstore disks --forget=/data/acme", False),
    ):
        told = Askers("user", Gate(None)).without_names({"problems": [{"kind": "disk", "fix": fix}]})
        assert told == {"problems": [{"kind": "disk", "fix": fix if shown else HIDDEN}]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as somebody else")
def test_names_can_be_for_all(place: Place, serve: Serve) -> None:
    """An operator who says so."""
    daemon = serve(place, *place.arguments, "--set=web.listen=127.0.0.1:0", "--set=web.names=all")
    assert str(place.data_dir) in as_stranger(url_of(daemon), "/live.json").decode()


def test_a_fix_that_names_a_directory() -> None:
    """What to do about a disk that is gone has its directory in it: that is no stranger's; all other advice is."""
    askers = Askers("user", Gate(None))
    advice = (
        "mount its disk; or kvstore disks --accept /mnt/a/kv, to take it",
        "who may write keeper/ there: look at it",
    )
    told = askers.without_names({"problems": [{"kind": "disk", "fix": fix} for fix in advice]})
    assert [one["fix"] for one in told["problems"]] == [HIDDEN, advice[1]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(min_size=1),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["model", "tenant", "reason", "x", "problems"]), inner)
    ),
)


@given(VALUES)
def test_all_text_is_hidden_that_is_not_known_to_be_harmless(value: Any) -> None:
    """Whatever field a later release adds; figures and shape stay."""
    left = Askers("user", Gate(None)).without_names(value)

    def texts(one: Any) -> set[str]:
        if isinstance(one, dict):
            return set().union(*map(texts, one.values()))
        return (
            set().union(*map(texts, one))
            if isinstance(one, list)
            else {one} & ({one} if isinstance(one, str) else set())
        )

    assert all(text == HIDDEN or text.startswith(("model-", "tenant-")) for text in texts(left))
    assert _shape(left) == _shape(value)


def _shape(value: Any) -> Any:
    """What is left of a value without its text."""
    if isinstance(value, dict):
        return {name: _shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shape(inner) for inner in value]
    return str if isinstance(value, str) else value
