"""Are the certificates of the doors good, and is the access file right?"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.daemon.beside.doors import require_doors
from kvstore.daemon.surroundings import CERTIFICATE_FIX
from kvstore.errors import StartError
from kvstore.security.tls import flaw_of, read_pem
from kvstore.tools.doctor.findings import Case, Finding


def certificates(case: Case) -> Iterator[Finding]:
    """As a daemon that starts would see them; one that answers says itself what is wrong with them."""
    if case.config is None:
        return
    s = case.config.security
    try:
        require_doors(case.config)
        flaw = flaw_of(s.tls_files, *read_pem(s.tls_files)) if s.tls_files is not None else None
    except StartError as error:
        yield Finding("security", "problem", str(error), "docs/security.md says what is allowed")
        return
    if flaw is None and (s.tls_files is not None or s.access_file):
        yield Finding("security", "ok", "certificates and access file can be used")
    elif flaw is not None and case.status is None:
        yield Finding("security", "warning", f"{flaw.file}: {flaw.text}", CERTIFICATE_FIX)
