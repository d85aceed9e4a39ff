"""The page and the metrics of a real daemon under certificates: who gets in, and who reads which names."""

from __future__ import annotations

import hashlib
import http.client
import socket
import ssl
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from tests.running import Daemon, Place
from tests.security.certificates import Authority, settings, write
from tests.web.asked import Serve, until

FILE = f"""
[[grant]]
name = "viewer"
roles = ["read"]

[[grant]]
name = "acme"
roles = ["read"]
tenant = "acme"

[[grant]]
name = "peer"
roles = ["peer"]

[[grant]]
token_sha256 = "{hashlib.sha256(b"prometheus-token").hexdigest()}"
label = "prometheus"
roles = ["read"]
"""


class Secured:
    """A daemon whose page has certificates, with blocks of two tenants."""

    def __init__(self, place: Place, serve: Serve) -> None:
        self.directory = place.path / "tls"
        self.directory.mkdir()
        self.servers, self.clients = Authority("servers"), Authority()
        self.files = write(self.directory, *self.servers.signed(), self.clients.pem)
        access = self.directory / "access.toml"
        access.write_text(FILE)
        listen = "--set=web.listen=0.0.0.0:0"
        self.daemon: Daemon = serve(place, *place.arguments, listen, *settings(self.files, access))
        found = until(lambda: self.daemon.log().partition("page at https://0.0.0.0:")[2], "the page listens")
        self.port = int(found.partition("/")[0])

    def context(self, *names: str, of: Authority | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.servers.pem.decode())
        if names:
            chain = self.directory / "client.pem"
            chain.write_bytes(b"".join((of or self.clients).signed(names)))
            context.load_cert_chain(chain)
        return context

    def connection(self, *names: str, of: Authority | None = None) -> http.client.HTTPSConnection:
        context = self.context(*names, of=of)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)


def get(connection: http.client.HTTPSConnection, path: str, **headers: str) -> tuple[int, str]:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def is_refused(connection: http.client.HTTPSConnection) -> bool:
    try:
        get(connection, "/healthz")
    except (ssl.SSLError, ConnectionError, http.client.HTTPException):
        return True
    return False


@pytest.fixture
def secured(place: Place, serve: Serve) -> Iterator[Secured]:
    made = Secured(place, serve)
    with Client(place.socket, timeout_s=10) as client:
        for number, tenant in enumerate(("acme", "globex")):
            fields = {"model": f"model-of-{tenant}", "tenant": tenant}
            space = client.namespace(bytes([number]) * 16, 4096, 32, 16, fields)
            client.lookup([space], [b"h" * 32], ticket=number + 1, tokens=16)
        yield made


def test_names_are_for_who_may_view_them(secured: Secured) -> None:
    """All for the right to view; a tenant's own for it; none for another certificate, or a peer's; a wrong token is refused. Who
    has a certificate may ask how the node is."""

    def names(*shown: str, **headers: str) -> list[list[bool]]:
        connection = secured.connection(*shown)
        texts = [get(connection, path, **headers)[1] for path in ("/metrics", "/live.json")]
        connection.close()
        return [[f"model-of-{tenant}" in text for tenant in ("acme", "globex")] for text in texts]

    until(lambda: names("viewer") == [[True, True]] * 2, "figures of both tenants")
    assert names("acme") == [[True, False]] * 2
    assert names("peer") == names("unknown") == [[False, False]] * 2
    assert names("unknown", Authorization="Bearer prometheus-token") == [[True, True]] * 2
    for path in ("/metrics", "/live.json", "/healthz"):
        status, text = get(secured.connection("viewer"), path, Authorization="Bearer yesterday's")
        assert (status, "not known" in text, "yesterday" in text) == (401, True, False)
    for path in ("/healthz", "/readyz"):
        assert get(secured.connection("unknown"), path)[0] == 200


def test_nobody_comes_in_without_a_certificate(secured: Secured) -> None:
    """Plain HTTP, no certificate, one of another authority; no older TLS; nothing of it keeps others out."""
    assert is_refused(secured.connection()) and is_refused(secured.connection("viewer", of=Authority()))
    older = secured.context("viewer")
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert is_refused(http.client.HTTPSConnection("127.0.0.1", secured.port, timeout=30, context=older))
    with socket.create_connection(("127.0.0.1", secured.port), 30) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(4096)
    silent = [socket.create_connection(("127.0.0.1", secured.port), 30) for _ in range(300)]
    try:
        assert get(secured.connection("viewer"), "/healthz")[0] == 200
        silent[0].settimeout(30)
        assert silent[0].recv(1) == b"", "too many that show nothing: the oldest are put out"
    finally:
        for one in silent:
            one.close()


def test_a_connection_does_not_outlive_its_authority(secured: Secured) -> None:
    """One that is open when the CA is exchanged is closed at its next request; who has a new certificate comes in."""
    opened = secured.connection("viewer")
    assert get(opened, "/healthz")[0] == 200
    other = Authority()
    write(secured.directory, *secured.servers.signed(), other.pem)
    until(lambda: is_refused(secured.connection("viewer")), "the old authority is out")
    opened.auto_open = 0
    with pytest.raises((http.client.HTTPException, ConnectionError, ssl.SSLError)):
        get(opened, "/healthz")
    assert get(secured.connection("viewer", of=other), "/healthz")[0] == 200
