"""Certificates of this node's doors: read, looked at once, and read again when their files change.

    certificate, key, CA ──▶ Pem, if they fit ──┬─▶ gRPC: a fetcher, asked for each connection
                                                ╰─▶ the page: an SSLContext, chosen for each connection

Every client must have a certificate that the CA has signed. What does not fit at a start is one line, and no start; later the
certificates that were good stay in use, and the log has the line. Before one ends there is a warning. A connection is as good as
the certificates were that it began with: doors give connections an age, and no session is resumed, so that a CA taken out is out
for good after that.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.constants import CONFIG_FILE_BYTES_MAX
from kvstore.errors import StartSettingError
from kvstore.security.watched import Watched
from kvstore.units import format_time
from tiers.reading import Unreadable, read_bytes

if TYPE_CHECKING:
    import grpc

# A certificate that ends within so long, or within such a part of its life where that is less, is warned of: who renews by himself
# does so earlier (SPIRE at half of it, cert-manager at two thirds, a kubelet at nine tenths at the latest).
SOON_S: Final = 7 * 86_400.0
SOON_SHARE: Final = 0.1

log = logging.getLogger("kvstore.security")


class TlsError(StartSettingError):
    """The certificates cannot be used."""


class TlsFiles(NamedTuple):
    """Where they are. ca: of those who sign the clients' certificates."""

    certificate: Path
    key: Path
    ca: Path


class Flaw(NamedTuple):
    """What is wrong with one of them. is_refused: now; else from a time on that is near."""

    file: Path
    text: str
    is_refused: bool


class Pem:
    """What is in them. Without a repr: there is a key in it."""

    def __init__(self, certificate: bytes, key: bytes, ca: bytes) -> None:
        self.certificate, self.key, self.ca = certificate, key, ca


def read_pem(files: TlsFiles) -> tuple[Pem, ssl.SSLContext]:
    """With the context that proves that they fit. Raises TlsError."""
    _require_private(files.key)
    pem = Pem(
        _part(files.certificate, b"CERTIFICATE-----"),
        _part(files.key, b"PRIVATE KEY-----"),
        _part(files.ca, b"CERTIFICATE-----"),
    )
    context = _own(files, pem)
    _trust(context, files.ca, pem.ca)
    if not context.cert_store_stats()["x509_ca"]:
        raise TlsError(
            f"{files.ca}: no certificate of an authority in it, which could have signed a client's"
        )
    context.verify_mode = ssl.CERT_REQUIRED
    return pem, context


class Tls:
    """Certificates as their files are now. For several threads."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TlsError."""
        self._files = files
        self._lock = threading.Lock()
        self._problem = ""
        self._watched = Watched(files, clock)
        self._watched.has_changed()
        self._pem, self._context = read_pem(files)
        if flaw := flaw_of(files, self._pem, self._context):
            log.warning("%s: %s", flaw.file, flaw.text)

    def newest(self) -> tuple[Pem, ssl.SSLContext]:
        """The same objects until the files change."""
        with self._lock:
            if self._watched.has_changed():
                try:
                    self._pem, self._context = read_pem(self._files)
                    log.info("certificates are read again", extra={"file": str(self._files.certificate)})
                    self._problem = ""
                except TlsError as error:
                    self._watched.forget()  # want of descriptors passes without a change
                    if self._problem != (problem := str(error)):
                        self._problem = problem
                        log.error("security: %s; those that were read before stay in use", error)
            return self._pem, self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a port of a gRPC server."""
        import grpc

        def configuration(pem: Pem) -> Any:
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca)

        sent = self._pem

        def fetch() -> Any:
            nonlocal sent
            pem, _ = self.newest()
            if pem is sent:
                return None
            sent = pem
            return configuration(pem)

        return grpc.dynamic_ssl_server_credentials(configuration(sent), fetch, True)

    def page_context(self) -> ssl.SSLContext:
        """For an HTTP server. Each connection gets the newest."""
        _, context = read_pem(self._files)

        def choose(connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self.newest()[1]

        context.sni_callback = choose  # OpenSSL asks it without a name, too
        return context


def identity_of(connection: ssl.SSLObject | None) -> dict[str, list[bytes]]:
    """The certificate that was shown, as gRPC has it in an auth context; nothing without TLS."""
    if connection is None:
        return {}
    shown = connection.getpeercert(binary_form=True)
    certificates = [ssl.DER_cert_to_PEM_cert(shown).encode()] if shown else []
    return {"transport_security_type": [b"ssl"], "x509_pem_cert": certificates}


def flaw_of(
    files: TlsFiles, pem: Pem, context: ssl.SSLContext, clock: Callable[[], float] = time.time
) -> Flaw | None:
    """Why whoever trusts this certificate refuses it: it has expired, is not valid yet, is not a server's. Else what ends soon: this
    one or one between it and its authority, or all authorities of the clients. pem, context: as `read_pem` has them. clock: unix seconds."""
    now_s = clock()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(client, files.certificate, pem.certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there)
    try:
        for side in (asking, _own(files, pem).wrap_bio(there, back, server_side=True)) * 3:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return Flaw(files.certificate, f"clients refuse it: {error.verify_message}", True)
    except ssl.SSLError as error:
        return Flaw(files.certificate, f"clients refuse it: {_why(error)}", True)
    own = [asking.getpeercert() or {}, *client.get_ca_certs()]
    if ends := min(_ends_soon(own, now_s), default=0.0):
        return Flaw(files.certificate, f"clients refuse it from {format_time(ends)} UTC on: it ends", False)
    authorities = context.get_ca_certs()
    if len(ending := _ends_soon(authorities, now_s)) == len(authorities):
        ends = max(ending)
        text = f"no client's certificate is good from {format_time(ends)} UTC on: the last authority ends"
        return Flaw(files.ca, text, ends <= now_s)
    return None


def _ends_soon(certificates: Iterable[Mapping[str, Any]], now_s: float) -> list[float]:
    """Unix seconds at which those end that do so soon."""
    found = []
    for one in certificates:
        begin_s, end_s = (ssl.cert_time_to_seconds(one[name]) for name in ("notBefore", "notAfter"))
        if end_s - now_s < min(SOON_S, SOON_SHARE * (end_s - begin_s)):
            found.append(float(end_s))
    return found


def _own(files: TlsFiles, pem: Pem) -> ssl.SSLContext:
    """Of a server with this certificate. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a resumed session would not be verified again
    try:
        with _in_memory(pem.certificate) as certificate, _in_memory(pem.key) as key:
            context.load_cert_chain(certificate, key, password=_refused)
    except _Encrypted as error:
        raise TlsError(f"{files.key}: the key is encrypted: allowed are keys without a password") from error
    except (ssl.SSLError, ValueError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{files.key}: not the key of {files.certificate}") from error
        raise TlsError(f"{files.certificate} or its key: not PEM that can be used: {_why(error)}") from error
    return context


def _trust(context: ssl.SSLContext, file: Path, certificates: bytes) -> None:
    """As from a file: OpenSSL passes over words between the certificates, in any language. Raises TlsError."""
    try:
        with _in_memory(certificates) as path:
            context.load_verify_locations(path)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise TlsError(f"{file}: not certificates in PEM: {_why(error)}") from error


class _Encrypted(Exception):
    """A password would be needed."""


def _refused() -> str:
    raise _Encrypted


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path for OpenSSL, which reads files only; what was read once is what is used."""
    fd = os.memfd_create("kvstore")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _part(path: Path, mark: bytes) -> bytes:
    try:
        content = read_bytes(path, CONFIG_FILE_BYTES_MAX)
    except Unreadable as error:
        raise TlsError(str(error)) from error
    if mark not in content:
        raise TlsError(
            f"{path}: not in PEM: a part that begins with -----BEGIN and {mark.decode()} is required"
        )
    return content


def _require_private(key: Path) -> None:
    """A group may read a key of root's: so Kubernetes projects it."""
    try:
        found = key.stat()
    except OSError as error:
        raise TlsError(f"{key}: {error.strerror}") from error
    allowed = 0o640 if found.st_uid == 0 else 0o600
    if stat.S_IMODE(found.st_mode) & 0o077 & ~allowed:
        raise TlsError(
            f"{key}: others may read the key (mode {stat.S_IMODE(found.st_mode):04o}): allowed is {allowed:04o}"
        )


def _why(error: Exception) -> str:
    """In words, and nothing of the content."""
    return str(
        getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
    ).lower()
