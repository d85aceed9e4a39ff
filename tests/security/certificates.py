"""Certificates of tests: an authority, and what it signs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.security.tls import TlsFiles

DAY = timedelta(days=1)


def pem_of(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


class Authority:
    """Signs certificates. Of two with the same name, the keys differ."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._begun(self._name, self._key, -DAY, 10 * DAY)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        signed = built.sign(self._key, hashes.SHA256())
        self.pem = signed.public_bytes(serialization.Encoding.PEM)

    def signed(
        self,
        names: Sequence[str] = (),
        uris: Sequence[str] = (),
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> tuple[bytes, bytes]:
        """A certificate and its key, in PEM, good for 127.0.0.1 and localhost. begins, ends: from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
        others = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        alternative = x509.SubjectAlternativeName([*others, *map(x509.UniformResourceIdentifier, uris)])
        built = self._begun(subject, key, begins, ends).add_extension(alternative, critical=False)
        certificate = built.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), pem_of(key)

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begins: timedelta, ends: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
        )


def write(directory: Path, certificate: bytes, key: bytes, ca: bytes) -> TlsFiles:
    """As security.certificate_file, key_file and ca_file name them; over what was there."""
    files = TlsFiles(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
    for path, content in zip(files, (certificate, key, ca), strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
    return files


def settings(files: TlsFiles, access: Path | None = None) -> list[str]:
    """Of a daemon with them."""
    named = {"certificate_file": files.certificate, "key_file": files.key, "ca_file": files.ca}
    if access is not None:
        named["access_file"] = access
    return [f"--set=security.{name}={path}" for name, path in named.items()]
