"""Certificates: who gets a connection to a gRPC server and to the page, before and after files change."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from kvstore.errors import NotKnown
from kvstore.security.identity import Gate, bearer
from kvstore.security.tls import Tls, TlsError, TlsFiles, flaw_of, identity_of, read_pem
from tests.security.certificates import DAY, Authority, pem_of, write

ENGINE = "spiffe://prod.example/ns/serving/sa/engine"
FILE = f"""
[[grant]]
spiffe = "{ENGINE}"
roles = ["read"]
tenant = "acme"

[[grant]]
name = "operator"
roles = ["admin"]
"""
Shown = tuple[bytes, bytes] | None


class Clock:
    """A second later each time."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


class Setting:
    """An authority of clients, one of servers, and a server's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clients, self.servers = Authority(), Authority("servers")
        self.files = self.written(self.clients)
        self.access = directory / "access.toml"
        self.access.write_text(FILE)
        self.tls = Tls(self.files, Clock())
        self.gate = Gate(self.access, Clock())

    def written(self, clients: Authority) -> TlsFiles:
        return write(self.directory, *self.servers.signed(), clients.pem)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@asynccontextmanager
async def grpc_server(setting: Setting) -> AsyncIterator[int]:
    """Tells each caller who it is. The port."""

    async def who(_request: bytes, context: Any) -> bytes:
        metadata = dict(context.invocation_metadata())
        try:
            principal = setting.gate.principal(
                context.auth_context(), context.peer(), None, bearer(metadata.get("authorization"))
            )
        except NotKnown as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return f"{principal} {principal.tenant} {' '.join(sorted(principal.may))}".encode()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(who)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.T", {"Who": handler})])
    port = server.add_secure_port("127.0.0.1:0", setting.tls.grpc_credentials())
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def by_grpc(port: int, setting: Setting, shown: Shown, **metadata: str) -> str:
    """On a connection of its own; "" where there is none."""
    certificate, key = shown or (None, None)
    trusted = grpc.ssl_channel_credentials(setting.servers.pem, key, certificate)
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options) as channel:
        try:
            return (
                await channel.unary_unary("/t.T/Who")(b"", metadata=[*metadata.items()], timeout=20)
            ).decode()
        except grpc.aio.AioRpcError as error:
            return "" if error.code() == grpc.StatusCode.UNAVAILABLE else error.code().name


@asynccontextmanager
async def page_server(setting: Setting) -> AsyncIterator[int]:
    """The same, over TLS alone."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            context = identity_of(writer.get_extra_info("ssl_object"))
            principal = setting.gate.principal(context, writer.get_extra_info("peername"), None, None)
            writer.write(f"{principal} {principal.tenant} {' '.join(sorted(principal.may))}".encode())
        except NotKnown:
            writer.write(b"UNAUTHENTICATED")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=setting.tls.page_context())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def by_tls(port: int, setting: Setting, shown: Shown) -> str:
    context = ssl.create_default_context(cadata=setting.servers.pem.decode())
    if shown is not None:
        chain = setting.directory / "client.pem"
        chain.write_bytes(shown[0] + shown[1])
        context.load_cert_chain(chain)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()
    except (ssl.SSLError, ConnectionError):
        return ""


Ask = Callable[[int, Setting, Shown], Any]
DOORS = pytest.mark.parametrize(("door", "ask"), [(grpc_server, by_grpc), (page_server, by_tls)])


@DOORS
def test_who_shows_no_good_certificate_gets_no_connection(setting: Setting, door: Any, ask: Ask) -> None:
    """None, another authority's of the same name, expired, not valid yet. Good ones have the name and the tenant of their grant; a
    good one that is not in the access file is nobody, nor is one with several identities, whichever of them is granted."""
    sign = setting.clients.signed

    async def asked() -> None:
        async with door(setting) as port:
            assert (
                await ask(port, setting, sign(["operator"]))
                == "operator None admin publisher read view write"
            )
            assert await ask(port, setting, sign(["x"], [ENGINE])) == f"{ENGINE} acme read view"
            for known_to_nobody in (
                sign(["x"]),
                sign([]),
                sign(["operator"], [ENGINE + "2"]),
                sign(["operator"], [ENGINE, ENGINE + "2"]),
                sign(["operator"], [ENGINE, "https://prod.example/"]),
                sign(["operator"], [ENGINE.upper()]),
                sign(["operator"], [ENGINE + "x" * 3000]),
                sign(["operator", "x"]),
                sign(["operator\0x"]),
            ):
                assert await ask(port, setting, known_to_nobody) == "UNAUTHENTICATED"
            bad = (
                None,
                Authority().signed(["operator"]),
                setting.servers.signed(["operator"]),
                sign(["operator"], begins=-2 * DAY, ends=-timedelta(minutes=1)),
                sign(["operator"], begins=timedelta(minutes=5)),
            )
            for shown in bad:
                assert await ask(port, setting, shown) == ""

    asyncio.run(asked())


@DOORS
def test_a_ca_that_is_taken_out_is_out(setting: Setting, door: Any, ask: Ask) -> None:
    """Without a restart: what it has signed gets no connection any more, what the next one signs does; files that are wrong
    meanwhile change nothing."""
    before, after = setting.clients, Authority()

    async def asked() -> None:
        async with door(setting) as port:
            old, new = before.signed(["operator"]), after.signed(["operator"])
            assert await ask(port, setting, old) and not await ask(port, setting, new)
            setting.files.key.write_bytes(b"half a k")
            assert await ask(port, setting, old) and not await ask(port, setting, new)
            setting.written(after)
            assert await ask(port, setting, new) and not await ask(port, setting, old)

    asyncio.run(asked())


@DOORS
def test_words_of_any_language_stand_between_certificates(setting: Setting, door: Any, ask: Ask) -> None:
    """As bundles have them: such files are read at a start, and when they come, and who is not in them any more is out."""
    before, after = setting.clients, Authority()
    words = "# Subject: CN=Főtanúsítvány, O=Société\n".encode()

    def written(authority: Authority) -> None:
        setting.written(authority)
        for path in setting.files:
            path.write_bytes(words + path.read_bytes() + b"# \xff\n")

    async def asked() -> None:
        written(before)
        assert Tls(setting.files).newest()
        async with door(setting) as port:
            old, new = before.signed(["operator"]), after.signed(["operator"])
            assert await ask(port, setting, old) and not await ask(port, setting, new)
            written(after)
            assert await ask(port, setting, new) and not await ask(port, setting, old)

    asyncio.run(asked())


def test_a_token_says_who_it_is_of(setting: Setting) -> None:
    """Under a certificate that the authority has signed, whosever; a wrong one is nobody's, though the certificate has a grant."""
    token = "a-token"
    grant = f'[[grant]]\ntoken_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\nlabel = "ci"\nroles = ["publisher"]\n'
    setting.access.write_text(FILE + grant)

    async def asked() -> None:
        async with grpc_server(setting) as port:
            some, operator = setting.clients.signed(["some"]), setting.clients.signed(["operator"])
            assert (
                await by_grpc(port, setting, some, authorization=f"Bearer {token}")
                == "ci None publisher view"
            )
            for wrong in ("Bearer a-tokem", "Basic x", "Bearer"):
                assert await by_grpc(port, setting, operator, authorization=wrong) == "UNAUTHENTICATED"

    asyncio.run(asked())


def test_no_session_is_resumed(setting: Setting) -> None:
    """Nothing would be verified again: the server sends no ticket."""

    async def asked() -> ssl.SSLSession | None:
        async with page_server(setting) as port:
            context = ssl.create_default_context(cadata=setting.servers.pem.decode())
            chain = setting.directory / "client.pem"
            chain.write_bytes(b"".join(setting.clients.signed(["operator"])))
            context.load_cert_chain(chain)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            await reader.read()
            session: ssl.SSLSession | None = writer.get_extra_info("ssl_object").session
            writer.close()
            return session

    session = asyncio.run(asked())
    assert session is None or not session.has_ticket


def test_files_that_do_not_fit_are_one_line(setting: Setting) -> None:
    """Which file, and what is allowed; nothing of what is in it."""
    good = {path: path.read_bytes() for path in setting.files}
    certificate, key, ca = setting.files
    other = setting.servers.signed()[1]
    encrypted = pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret")

    def wrong(path: Path, content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(TlsError) as caught:
            read_pem(setting.files)
        path.write_bytes(good[path])
        message = str(caught.value)
        assert "\n" not in message and not [
            line for line in good[key].decode().split("\n")[1:-2] if line in message
        ]
        return message

    assert wrong(key, other) == f"{key}: not the key of {certificate}"
    assert wrong(key, b"").startswith(f"{key}: not in PEM")
    assert wrong(key, good[key][:90] + b"-----END PRIVATE KEY-----").startswith(f"{certificate} or its key: ")
    assert "without a password" in wrong(key, encrypted)
    assert wrong(certificate, b"x").startswith(f"{certificate}: not in PEM")
    assert wrong(ca, b"-----BEGIN CERTIFICATE-----\n").startswith(f"{ca}: ")
    assert "authority" in wrong(ca, good[certificate])
    assert "too large" in wrong(ca, b"x" * (2 << 20))
    key.chmod(0o644)
    with pytest.raises(TlsError, match="others may read the key"):
        read_pem(setting.files)
    key.unlink()
    with pytest.raises(TlsError, match=f"{key}: No such file"):
        read_pem(setting.files)


def test_a_certificate_that_clients_will_refuse_is_a_warning(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon serves all the same: its engines do not come that way."""
    for words, begins, ends in (("expired", -2 * DAY, -DAY), ("not yet valid", DAY, 2 * DAY)):
        files = write(
            setting.directory, *setting.servers.signed(begins=begins, ends=ends), setting.clients.pem
        )
        caplog.clear()
        Tls(files)
        assert [record.levelname for record in caplog.records] == ["WARNING"] and words in caplog.text
    files = setting.written(setting.clients)
    assert flaw_of(files, *read_pem(files)) is None


def test_what_ends_soon_is_told_before_it_does(setting: Setting) -> None:
    """A week before, or a tenth of its life where that is less: what is renewed every hour is not told of all the time. An
    authority of clients counts where there is no other one that lasts."""

    def is_told(begins: timedelta, ends: timedelta) -> bool:
        own = setting.servers.signed(begins=begins, ends=ends)
        files = write(setting.directory, *own, setting.clients.pem)
        flaw = flaw_of(files, *read_pem(files))
        assert flaw is None or (flaw.file, flaw.is_refused) == (files.certificate, False)
        return flaw is not None and "clients refuse it from " in flaw.text

    year, hour, minute = 365 * DAY, DAY / 24, DAY / 1440
    assert is_told(-year, 6 * DAY) and not is_told(-year, 8 * DAY)
    assert is_told(-55 * minute, 5 * minute) and not is_told(-50 * minute, 10 * minute)
    assert not is_told(-hour, year)
    now_s = time.time() + 9.5 * DAY.total_seconds()  # of an authority there are ten days, of eleven
    files = write(setting.directory, *setting.servers.signed(ends=year), setting.clients.pem)
    flaw = flaw_of(files, *read_pem(files), lambda: now_s)
    assert flaw is not None and (flaw.file, flaw.is_refused) == (files.ca, False)
    flaw = flaw_of(files, *read_pem(files), lambda: now_s + DAY.total_seconds())
    assert flaw is not None and flaw.is_refused and "no client's certificate" in flaw.text
