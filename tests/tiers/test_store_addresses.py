"""Where a bucket is asked for, and a store whose certificate is not believed."""

from __future__ import annotations

import asyncio
import datetime
import errno
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.daemon.config.regions_file import Place
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import open_objects
from tiers.errors import ObjectError, ObjectMissing, ObjectRefused

Signed = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
DAY = datetime.timedelta(days=1)


def signed(host: str, by: Signed | None = None, days: int = 2) -> Signed:
    """A certificate for this host that ends in so many days; by: who signs, itself when nobody does."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    is_number = host[0].isdigit()
    of = x509.IPAddress(ipaddress.ip_address(host)) if is_number else x509.DNSName(host)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(by[0].subject if by is not None else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 9 * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(by is None, None), critical=True)
        .add_extension(x509.SubjectAlternativeName([of]), critical=False)
    )
    return builder.sign(by[1] if by is not None else key, hashes.SHA256()), key


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None: ...


@pytest.fixture
def serve_as(tmp_path: Path) -> Iterator[Callable[[Signed], str]]:
    """A store with this certificate; its endpoint."""
    servers = []

    def start(certificate: Signed) -> str:
        pem = tmp_path / "server.pem"
        key = certificate[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem.write_bytes(certificate[0].public_bytes(serialization.Encoding.PEM) + key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"https://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def asked(endpoint: str) -> ObjectError:
    async def ask() -> ObjectError:
        options = ObjectOptions(endpoint=endpoint, access_key_id="a", secret_access_key="b", retries_max=0)
        with pytest.raises(ObjectError) as error:
            await open_objects("s3://bucket/kv", options).get("x")
        return error.value

    return asyncio.run(ask())


def test_a_certificate_that_is_not_trusted_is_named(
    serve_as: Callable[[Signed], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who issued it is not known, it is of another name, it has expired: each in a line, and refused for good. With the issuer in
    SSL_CERT_FILE the store is asked."""
    authority = signed("ca.example")
    unknown = asked(serve_as(signed("127.0.0.1", authority)))
    assert isinstance(unknown, ObjectRefused) and "SSL_CERT_FILE" in str(unknown)
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(authority[0].public_bytes(serialization.Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    assert isinstance(asked(serve_as(signed("127.0.0.1", authority))), ObjectMissing)
    other = asked(serve_as(signed("other.example", authority)))
    assert isinstance(other, ObjectRefused) and "other names" in str(other)
    expired = asked(serve_as(signed("127.0.0.1", authority, days=-1)))
    assert isinstance(expired, ObjectRefused) and "expired" in str(expired)


@pytest.mark.parametrize(
    ("bucket", "endpoint"),
    [
        ("bucket", "https://10.0.0.1:9000"), ("bucket", "http://[::1]:9000"), ("under_score", "https://s3.example"),
        ("bucket-", "https://s3.example"), ("b..b", "https://s3.example"), ("bucket", "https://127.1"),
    ],
)  # fmt: skip
def test_no_bucket_in_a_host_that_cannot_be(bucket: str, endpoint: str) -> None:
    """It is refused in a line before anybody is asked: the library below would end in a panic."""
    options = ObjectOptions(endpoint=endpoint, path_style=False, allow_http=True)
    with pytest.raises(ObjectRefused, match="path_style"):
        open_objects(f"s3://{bucket}/kv", options)


@pytest.mark.parametrize(
    ("bucket", "endpoint", "is_in_path"),
    [
        ("kv", "", False), ("kv-na", "", False), ("my.bucket", "", True), ("My", "", True), ("my_bucket", "", True),
        ("kv", "https://s3.example", True),
    ],
)  # fmt: skip
def test_where_a_bucket_stands(bucket: str, endpoint: str, is_in_path: bool) -> None:
    """Before the cloud's own host only where its certificates cover that; whoever says "on" or "off" is obeyed."""
    place = {"url": f"s3://{bucket}/kv", "endpoint": endpoint}
    assert Place(**place).options().path_style is is_in_path
    assert Place(**place, path_style="on").options().path_style
    assert not Place(**place, path_style="off").options().path_style


def test_a_profile_that_is_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets AWS_PROFILE and finds no credentials learns why."""
    from tiers.bucket.object_failures import failure

    error = OSError("GET http://169.254.169.254/latest/api/token")
    assert "AWS_PROFILE" not in str(failure(error, "s3://b: get x"))
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert "AWS_PROFILE is set, and profiles are not read" in str(failure(error, "s3://b: get x"))


def test_a_folder_that_may_not_be_listed_is_refused() -> None:
    """What our own lists of a directory meet is told as what obstore meets: by its number, and tried again only where that is of use."""
    from tiers.bucket.object_failures import failure
    from tiers.errors import ObjectMissing, ObjectRefused

    refused = failure(
        PermissionError(errno.EACCES, "Permission denied", "/b/nodes"), "file:///b: list nodes/"
    )
    assert isinstance(refused, ObjectRefused)
    assert str(refused) == "file:///b: list nodes/: Permission denied"
    assert isinstance(
        failure(FileNotFoundError(errno.ENOENT, "No such file", "/b/x"), "file:///b: get x"), ObjectMissing
    )
