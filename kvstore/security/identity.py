"""Who asks through a TCP door: one Principal for every call.

    token ────────────▶ access file ─┬─ a grant ─▶ Principal(may, name, tenant)
    certificate ──────▶ access file ─┤
    loopback, no TLS ─▶ its user ────┴─ ours, or root ─▶ Principal(everything)
                                        else ─▶ NotKnown

What is shown counts, and only that: a wrong token is not made good by a certificate, nor by the user. A certificate with a
SPIFFE ID is known by it alone; another by its common name. The doors have had certificates verified before (tls.py): here
is only who they are of, read from the certificate itself (gRPC's own fields leave out a SPIFFE ID that is not the only one, and
all names but the first). A token counts under TLS and within this machine; in the clear it is no secret any more.

The access file is read again when it changes. While it is wrong, nobody comes in by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from kvstore.errors import NotKnown
from kvstore.security.access import (
    NAME_CHARS_MAX,
    SPIFFE_CHARS_MAX,
    AccessFileError,
    Grant,
    Grants,
    read_access,
)
from kvstore.security.principals import Principal, local
from kvstore.security.sockets import PROC, End, end_of, user_of
from kvstore.security.watched import Watched

TOKEN_CHARS_MAX = 16 << 10
CERTIFICATES_MAX = 1024  # whose names are remembered
SCHEME: Final = "bearer "

log = logging.getLogger("kvstore.security")

Peer = str | tuple[Any, ...]  # as gRPC writes it ("ipv4:127.0.0.1:40000"), or as sockets do


class Gate:
    """Of one process. access_file: None: nobody comes in by certificate or token."""

    def __init__(
        self, access_file: Path | None, clock: Callable[[], float] = time.monotonic, proc: Path = PROC
    ) -> None:
        self._path = access_file
        self._watched = Watched([access_file], clock) if access_file is not None else None
        self._proc = proc
        self._grants, self._problem = Grants(), ""

    def principal(
        self,
        auth_context: Mapping[str, Iterable[bytes]],
        peer: Peer,
        sockname: tuple[Any, ...] | None,
        token: str | None,
    ) -> Principal:
        """Who asks. auth_context: of a certificate that was verified (`x509_pem_cert`), as gRPC has it; without TLS nothing. sockname:
        our end of the connection, or where the door listens. Raises NotKnown."""
        is_tls = b"ssl" in auth_context.get("transport_security_type", ())
        theirs = _end(peer)
        if token is not None:
            if not is_tls and (theirs is None or not theirs.address.is_loopback):
                raise NotKnown("a token was sent in the clear, for all to read: it counts under TLS only")
            is_one = 0 < len(token) <= TOKEN_CHARS_MAX
            return _of(self.grants().of_token(token) if is_one else None, "this token")
        if is_tls:
            return self._certified(auth_context)
        ours = _beside(theirs, sockname)
        uid = user_of(theirs, ours, self._proc) if theirs is not None and ours is not None else None
        if uid is None or not (user := local(uid, 0)).may:
            raise NotKnown(
                "neither a certificate nor a token, nor a process of the daemon's user on this machine"
            )
        return user._replace(name=f"uid {uid}")

    def grants(self) -> Grants:
        """Of the file as it is."""
        if self._watched is not None and self._path is not None and self._watched.has_changed():
            try:
                self._grants, self._problem = read_access(self._path), ""
                log.info("the access file is read", extra={"file": str(self._path)})
            except (AccessFileError, OSError) as error:
                self._grants, old, self._problem = Grants(), self._problem, str(error)
                self._watched.forget()  # want of descriptors passes without a change
                if self._problem != old:
                    log.error(
                        "security.access_file: %s; nobody comes in by it until it is right again", error
                    )
        return self._grants

    def _certified(self, auth_context: Mapping[str, Iterable[bytes]]) -> Principal:
        uris, names = _names_in(*auth_context.get("x509_pem_cert", ()))
        if any(uri.strip().lower().startswith("spiffe:") for uri in uris):
            name = _only(uris, SPIFFE_CHARS_MAX)
            return _of(self.grants().of_spiffe(name), name)
        name = _only(names, NAME_CHARS_MAX)
        return _of(self.grants().of_name(name), name)


def bearer(authorization: str | None) -> str | None:
    """The token in an Authorization header, or of gRPC's metadata; None without one. Raises NotKnown."""
    if authorization is None:
        return None
    if not authorization[: len(SCHEME)].lower() == SCHEME:
        raise NotKnown('authorization: allowed is "Bearer TOKEN"')
    return authorization[len(SCHEME) :].strip()


def _of(grant: Grant | None, who: str) -> Principal:
    if grant is None:
        raise NotKnown(f"{who}: not known here")
    return Principal(-1, 0, grant.may, grant.name, grant.tenant)


@lru_cache(CERTIFICATES_MAX)
def _names_in(*shown: bytes) -> tuple[Sequence[str], Sequence[str]]:
    """The URIs and the common names of the one certificate that was shown, in PEM. Raises NotKnown."""
    from cryptography import x509

    try:
        (certificate,) = map(x509.load_pem_x509_certificate, shown)
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = others.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise NotKnown("the certificate cannot be read, or none was shown") from error
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return uris, [name.value if isinstance(name.value, str) else "" for name in names]


def _only(values: Sequence[str], chars_max: int) -> str:
    """Of several nobody knows which one is meant."""
    text = values[0] if len(values) == 1 else ""
    if not 0 < len(text) <= chars_max or not text.isprintable():
        raise NotKnown(
            "the certificate has no name, or more than one: a SPIFFE ID or a common name is required"
        )
    return text


def _end(peer: Peer) -> End | None:
    """None: not of TCP."""
    try:
        if not isinstance(peer, str):
            return end_of(peer)
        family, _, rest = unquote(peer).partition(":")
        host, _, port = rest.rpartition(":")
        return end_of((host.strip("[]"), port)) if family in ("ipv4", "ipv6") else None
    except (ValueError, IndexError):
        return None


def _beside(theirs: End | None, sockname: tuple[Any, ...] | None) -> End | None:
    """Our end. A door at "localhost" has two addresses."""
    if theirs is None or not sockname:
        return None
    host = sockname[0]
    if host == "localhost":
        host = "127.0.0.1" if theirs.address.version == 4 else "::1"
    return _end((host, *sockname[1:]))
