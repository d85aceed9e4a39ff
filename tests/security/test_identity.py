"""Who asks: certificates, tokens and users of this machine become principals, or nobody."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import NotKnown
from kvstore.security import access
from kvstore.security.identity import TOKEN_CHARS_MAX, Gate, bearer
from kvstore.security.principals import EVERYTHING
from kvstore.security.sockets import end_of, user_of
from tests.security.certificates import Authority

TLS = {"transport_security_type": [b"ssl"]}
CLIENTS = Authority()
FAR = "ipv4:10.1.2.3:40000"
STRANGER = 65534


def sha(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


FILE = f"""
[[grant]]
spiffe = "spiffe://prod.example/ns/serving/*"
roles = ["read"]

[[grant]]
spiffe = "spiffe://prod.example/ns/serving/sa/engine"
roles = ["write"]
tenant = "acme"

[[grant]]
name = "operator"
roles = ["admin"]

[[grant]]
token_sha256 = "{sha("today")}"
label = "prometheus"
roles = ["read"]
"""


def spiffe(*identities: str, name: str = "operator") -> dict[str, Iterable[bytes]]:
    """Of a certificate with this common name, too."""
    return {**TLS, "x509_pem_cert": [CLIENTS.signed([name], identities)[0]]}


def named(*names: str) -> dict[str, Iterable[bytes]]:
    return {**TLS, "x509_pem_cert": [CLIENTS.signed(names)[0]]}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def gate(file: Path) -> Gate:
    return Gate(file, Clock())


def test_a_certificate_is_known_by_its_longest_grant(gate: Gate) -> None:
    """Exact before a beginning; the tenant comes with the grant, the name is the identity that was shown."""
    engine = gate.principal(spiffe("spiffe://prod.example/ns/serving/sa/engine"), FAR, None, None)
    assert (engine.tenant, engine.uid, str(engine)) == (
        "acme",
        -1,
        "spiffe://prod.example/ns/serving/sa/engine",
    )
    assert engine.may == {"read", "write", "view"}
    other = gate.principal(spiffe("spiffe://prod.example/ns/serving/sa/router"), FAR, None, None)
    assert (other.tenant, other.may, other.name) == (
        None, {"read", "view"}, "spiffe://prod.example/ns/serving/sa/router",
    )  # fmt: skip
    assert gate.principal(named("operator"), FAR, None, None).may == EVERYTHING - {"peer"}


@pytest.mark.parametrize(
    "shown",
    [
        spiffe("spiffe://prod.example/ns/serving"),
        spiffe("spiffe://prod.example/ns/serving-2/sa/x"),
        spiffe("spiffe://prod.example/ns/serving/../admin"),
        spiffe("spiffe://prod.example/ns/serving/"),
        spiffe("spiffe://prod.example/ns/serving/*"),
        spiffe("spiffe://prod.example/ns/serving//x"),
        spiffe("spiffe://prod.example/ns/serving/x\n"),
        spiffe("spiffe://prod.example/ns/serving/%2e%2e/x"),
        spiffe("spiffe://PROD.example/ns/serving/x"),
        spiffe("SPIFFE://prod.example/ns/serving/x"),
        spiffe(" spiffe://prod.example/ns/serving/x"),
        spiffe("spiffe://prod.example/ns/serving/x", "https://prod.example/"),
        spiffe("https://prod.example/", "spiffe://prod.example/ns/serving/x"),
        spiffe("spiffe://prod.example/ns/serving/" + "x" * 2048),
        spiffe("spiffe://prod.example/ns/serving/a", "spiffe://prod.example/ns/serving/b"),
        named("nobody"),
        named("Operator"),
        named("operator", "operator"),
        named("operator", "nobody"),
        named("operator\0x"),
        named("operator "),
        named(),
        named("prometheus"),
        named(sha("today")),
        TLS,
        {**TLS, "x509_pem_cert": [b"no certificate"]},
        {**TLS, "x509_pem_cert": 2 * list(named("operator")["x509_pem_cert"])},
        {**TLS, "x509_common_name": [b"operator"]},
    ],
)
def test_no_other_certificate_is_known(gate: Gate, shown: dict[str, Iterable[bytes]]) -> None:
    """Neighbours, ways out of a prefix, several identities, none; and a SPIFFE ID that is not granted has no name to fall back on."""
    with pytest.raises(NotKnown):
        gate.principal(shown, FAR, None, None)


def test_a_token_counts_under_tls_and_within_this_machine(gate: Gate) -> None:
    """In the clear, from elsewhere, it does not; a wrong one is not made good by the certificate or the user who shows it."""
    for context, peer in ((TLS, FAR), ({}, "ipv4:127.0.0.1:40000"), ({}, "ipv6:%5B::1%5D:40000")):
        known = gate.principal(context, peer, None, "today")
        assert (str(known), known.may) == ("prometheus", {"read", "view"})
    with pytest.raises(NotKnown, match="in the clear"):
        gate.principal({}, FAR, None, "today")
    with connection() as (theirs, ours):
        for wrong in ("yesterday", "", "today ", sha("today"), "\udc80", "x" * (TOKEN_CHARS_MAX + 1)):
            with pytest.raises(NotKnown, match="this token"):
                gate.principal(named("operator"), FAR, None, wrong)
            with pytest.raises(NotKnown, match="this token"):
                gate.principal({}, theirs, ours, wrong)


def test_a_token_is_compared_with_all_of_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compare_digest, as often whether the first is right, or the last, or none: how long it takes tells nothing."""
    tokens = [f"token-{number}" for number in range(20)]
    grant = '[[grant]]\ntoken_sha256 = "{}"\nlabel = "{}"\nroles = ["read"]\n'
    file.write_text("".join(grant.format(sha(token), token) for token in tokens))
    grants = access.read_access(file)
    compared, compare = 0, hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        nonlocal compared
        compared += 1
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token, name in ((tokens[0], tokens[0]), (tokens[-1], tokens[-1]), ("none", None)):
        compared = 0
        found = grants.of_token(token)
        assert (found.name if found else None, compared) == (name, 20)


def test_a_file_that_changes_counts_at_once(file: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """Yesterday's token is out with the file it stood in; while the file is missing or wrong nobody comes in by it, with one
    line; and the daemon's user always does."""
    assert gate.principal(TLS, FAR, None, "today").name == "prometheus"
    file.write_text(FILE.replace(sha("today"), sha("later")))  # as long as before
    with pytest.raises(NotKnown):
        gate.principal(TLS, FAR, None, "today")
    assert gate.principal(TLS, FAR, None, "later").name == "prometheus"
    for spoil in (file.unlink, lambda: file.write_text(FILE + "[[grant]]\n"), lambda: file.chmod(0o666)):
        file.write_text(FILE)
        file.chmod(0o600)
        assert gate.principal(named("operator"), FAR, None, None).may
        caplog.clear()
        spoil()
        for shown, token in ((TLS, "today"), (named("operator"), None)):
            with pytest.raises(NotKnown):
                gate.principal(shown, FAR, None, token)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        with connection() as (theirs, ours):
            assert gate.principal({}, theirs, ours, None).may == EVERYTHING


def test_without_a_file_nobody_comes_in_by_it() -> None:
    """Certificates and tokens of whoever."""
    for shown, token in ((named("operator"), None), (TLS, "today")):
        with pytest.raises(NotKnown):
            Gate(None).principal(shown, FAR, None, token)


@contextmanager
def connection(family: int = socket.AF_INET) -> Iterator[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Its ends as a door for both families sees them: (theirs, ours)."""
    with socket.socket(socket.AF_INET6) as door:
        door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind(("::", 0))
        door.listen()
        with socket.socket(family) as client:
            client.connect(("::1" if family == socket.AF_INET6 else "127.0.0.1", door.getsockname()[1]))
            accepted, _ = door.accept()
            with accepted:
                yield accepted.getpeername(), accepted.getsockname()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_says_whose_a_connection_is(
    family: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked for one socket or by its table; of one that has ended, or is nowhere, it knows nobody."""
    proc = Path("/proc/self/net")
    with connection(family) as ends:
        theirs, ours = map(end_of, ends)
        assert user_of(theirs, ours, tmp_path) == os.geteuid()
        monkeypatch.setattr(socket, "AF_NETLINK", -1)  # as where the kernel does not speak it
        assert user_of(theirs, ours, tmp_path) is None
        assert user_of(theirs, ours, proc) == os.geteuid()
        monkeypatch.undo()
    assert user_of(theirs, ours, tmp_path) is None and user_of(theirs, ours, proc) is None
    assert user_of(end_of(("10.1.2.3", 5)), ours, proc) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_machine_is_nobody(gate: Gate) -> None:
    """The daemon's user may everything, another nothing; under TLS a user is no identity at all."""
    with connection() as (theirs, ours):
        assert str(gate.principal({}, f"ipv4:127.0.0.1:{theirs[1]}", ("localhost", ours[1]), None)) == "uid 0"
        assert gate.principal({}, theirs, ours, None).may == EVERYTHING
        for wrong in (None, ("127.0.0.2", ours[1]), ("127.0.0.1", 1)):
            with pytest.raises(NotKnown):
                gate.principal({}, theirs, wrong, None)
        with pytest.raises(NotKnown):
            gate.principal(TLS, theirs, ours, None)
    os.seteuid(STRANGER)
    try:
        made = connection()
        theirs, ours = made.__enter__()
    finally:
        os.seteuid(0)
    with pytest.raises(NotKnown):
        gate.principal({}, theirs, ours, None)
    made.__exit__(None, None, None)


@pytest.mark.parametrize("peer", ["", "unix:/x", "ipv4:127.0.0.1", "ipv4:localhost:1", "ipv6:[::1", ":", ()])
def test_a_peer_without_an_address_is_nobody(gate: Gate, peer: str | tuple[object, ...]) -> None:
    """Whatever a transport says of it."""
    with pytest.raises(NotKnown):
        gate.principal({}, peer, ("127.0.0.1", 1), None)


def test_a_header_has_a_bearer_token_or_is_refused() -> None:
    """The scheme in any case; none is none."""
    assert bearer(None) is None and bearer("Bearer x.y-z") == bearer("bearer  x.y-z ") == "x.y-z"
    for wrong in ("", "Basic eDp5", "Bearer", "x"):
        with pytest.raises(NotKnown):
            bearer(wrong)


TWICE = f"""
[[grant]]
name = "a"
roles = ["read"]

[[grant]]
token_sha256 = "{sha("x")}"
label = "a"
roles = ["read"]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "'x'"),
        ("grant = 1", "[[grant]]"),
        ("grant = [1]", "[[grant]]"),
        ('# first\n[[grant]]\nname = "a"\nroles = []', "line 2: roles"),
        ('[[grant]]\nname = "a"\nroles = ["root"]', "read, write, admin"),
        ('[[grant]]\nname = "a"\nroles = "read"', "roles"),
        ('[[grant]]\nroles = ["read"]', "0 identities"),
        ('[[grant]]\nname = "a"\nspiffe = "spiffe://a/b"\nroles = ["read"]', "2 identities"),
        ('[[grant]]\nname = "a"\nrole = ["read"]', "'role'"),
        ('[[grant]]\nname = 7\nroles = ["read"]', "not a text"),
        ('[[grant]]\nname = ""\nroles = ["read"]', "1 to 256"),
        ('[[grant]]\nname = "a"\nlabel = "b"\nroles = ["read"]', "label"),
        (f'[[grant]]\ntoken_sha256 = "{sha("x")}"\nroles = ["read"]', "label"),
        (f'[[grant]]\ntoken_sha256 = "{sha("x")}"\nlabel = "a b"\nroles = ["read"]', "label"),
        ('[[grant]]\ntoken_sha256 = "secret"\nlabel = "a"\nroles = ["read"]', "64 digits"),
        ('[[grant]]\nspiffe = "spiffe://a"\nroles = ["read"]', "spiffe://domain/path"),
        ('[[grant]]\nspiffe = "spiffe://a/b*"\nroles = ["read"]', "spiffe://domain/path"),
        ('[[grant]]\nspiffe = "spiffe://a/*/b"\nroles = ["read"]', "spiffe://domain/path"),
        ('[[grant]]\nname = "a"\nroles = ["admin"]\ntenant = "t"', "all tenants"),
        ('[[grant]]\nname = "a"\nroles = ["read", "peer"]\ntenant = "t"', "all tenants"),
        ('[[grant]]\nname = "a"\nroles = ["publisher"]\ntenant = ""', "all tenants"),
        ('[[grant]]\nname = "a"\nroles = ["read"]\ntenant = "\\u0000"', "tenant"),
        ('[[grant]]\nname = "a"\nroles = ["read"]\n' * 2, "line 4: 'a' stands here twice"),
        (TWICE, "twice"),
        ('[[grant]]\nname = "a"\nroles = ["read"]\n[[gra', "not valid TOML"),
        ("x" * (2 << 20), "too large"),
        ("[[grant]]\n" * 1025, "allowed are 1024"),
        ("\0", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(file: Path, text: str, words: str) -> None:
    """The file, where, what is wrong and what is allowed; a token that was pasted in place of its hash is not repeated."""
    file.write_text(text)
    with pytest.raises(access.AccessFileError) as caught:
        access.read_access(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and words in message and "\n" not in message
    assert "secret" not in message and len(message) < 600
