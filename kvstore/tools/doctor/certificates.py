"""Are the certificates of the doors good, and is the access file right?"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.daemon.beside.doors import require_doors
from kvstore.errors import StartError
from kvstore.security.tls import problem_of, read_pem
from kvstore.tools.doctor.findings import Case, Finding


def certificates(case: Case) -> Iterator[Finding]:
    """As a daemon that starts would see them."""
    if case.config is None:
        return
    s = case.config.security
    files = s.tls_files
    try:
        require_doors(case.config)
        problem = problem_of(files, read_pem(files)[0]) if files is not None else ""
    except StartError as error:
        yield Finding("security", "problem", str(error), "docs/security.md says what is allowed")
        return
    if problem:
        found = f"clients will refuse {s.certificate_file}: {problem}"
        yield Finding(
            "security", "warning", found, "put a new one in its place: it is read without a restart"
        )
    elif files is not None or s.access_file:
        yield Finding("security", "ok", "certificates and access file can be used")
