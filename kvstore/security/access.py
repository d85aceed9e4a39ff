"""The access file: who may what, by certificate or token. deploy/access.toml explains it.

    [[grant]]                                        [[grant]]
    spiffe = "spiffe://prod.example/ns/serving/*"    token_sha256 = "9f86…"
    roles = ["read", "write"]                        label = "prometheus"
    tenant = "acme"                                  roles = ["read"]

A wrong file is one error: file, line, what is wrong and what is allowed. Nothing in it is secret: of a token it has the
SHA-256, which is compared in constant time with all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.constants import CONFIG_FILE_BYTES_MAX, TENANT_CHARS_MAX
from kvstore.errors import StartSettingError
from kvstore.security.principals import Access
from tiers.reading import Unreadable, as_toml, read_text

GRANTS_MAX = 1024
NAME_CHARS_MAX = 256
SPIFFE_CHARS_MAX = 2048  # as its standard has it

ROLES: Final[Mapping[str, frozenset[Access]]] = {
    "read": frozenset[Access]({"read", "view"}),
    "write": frozenset[Access]({"read", "write", "view"}),
    "admin": frozenset[Access]({"read", "write", "view", "admin", "publisher"}),
    "publisher": frozenset[Access]({"view", "publisher"}),
    "peer": frozenset[Access]({"peer"}),
}
_OF_A_TENANT = ("read", "write")  # the others are about all tenants
_WHO = ("spiffe", "name", "token_sha256")
_KEYS = (*_WHO, "label", "roles", "tenant")
_SPIFFE = re.compile(r"spiffe://[a-z0-9._-]{1,255}((?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+)")
_LABEL = re.compile(r"[A-Za-z0-9._@/-]{1,64}")
_HEX = re.compile(r"[0-9a-f]{64}")
_BEGINNING = re.compile(r"\s*\[\[\s*grant\s*\]\]")


class AccessFileError(StartSettingError):
    """The access file cannot be used."""


class Grant(NamedTuple):
    """What somebody may. name: whose, for logs."""

    name: str
    may: frozenset[Access]
    tenant: str | None


class Grants:
    """Those of a file; of none, nobody."""

    def __init__(self, found: Mapping[str, Mapping[str, Grant]] | None = None) -> None:
        """found: by kind and identity."""
        found = found or {}
        self._exact, self._names = found.get("spiffe", {}), found.get("name", {})
        self._tokens = [(bytes.fromhex(text), grant) for text, grant in found.get("token_sha256", {}).items()]

    def of_spiffe(self, identity: str) -> Grant | None:
        """Exact, or the longest beginning that is granted. The grant's name is the identity."""
        if not is_spiffe(identity):
            return None
        grant, left = self._exact.get(identity), identity
        while grant is None and "/" in left:
            left = left.rpartition("/")[0]
            grant = self._exact.get(f"{left}/*")
        return None if grant is None else grant._replace(name=identity)

    def of_name(self, name: str) -> Grant | None:
        return self._names.get(name)

    def of_token(self, token: str) -> Grant | None:
        """Compares with all of them, wherever it fits."""
        digest, found = hashlib.sha256(token.encode(errors="surrogatepass")).digest(), None
        for known, grant in self._tokens:
            if hmac.compare_digest(known, digest):
                found = grant
        return found


def is_spiffe(text: str) -> bool:
    return len(text) <= SPIFFE_CHARS_MAX and _SPIFFE.fullmatch(text) is not None


def read_access(path: Path) -> Grants:
    """Raises AccessFileError."""
    try:
        text = read_text(path, CONFIG_FILE_BYTES_MAX)
        tables = as_toml(path, text)
    except Unreadable as error:
        raise AccessFileError(str(error)) from error
    if path.stat().st_mode & stat.S_IWOTH:
        raise AccessFileError(f"{path}: every user may write to it: allowed are modes without o+w")
    try:
        return Grants(_grants(tables, _lines(text)))
    except ValueError as error:
        raise AccessFileError(f"{path}: {error}") from error


def _lines(text: str) -> list[int]:
    """Where each grant begins."""
    return [number for number, line in enumerate(text.splitlines(), 1) if _BEGINNING.match(line) is not None]


def _grants(tables: dict[str, Any], lines: list[int]) -> dict[str, dict[str, Grant]]:
    """By kind and identity. Raises ValueError."""
    rows = tables.pop("grant", [])
    if tables:
        raise ValueError(f"{next(iter(tables))!r}: allowed is [[grant]], and nothing else")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("grant: allowed are tables, each under [[grant]]")
    if len(rows) > GRANTS_MAX:
        raise ValueError(f"{len(rows)} grants: allowed are {GRANTS_MAX}")
    found: dict[str, dict[str, Grant]] = {kind: {} for kind in _WHO}
    labels: set[str] = set()
    for index, row in enumerate(rows):
        try:
            kind, identity, grant = _grant(row)
            if identity in found[kind] or grant.name in labels:
                raise ValueError(
                    f"{grant.name!r} stands here twice: one grant each, and labels are names, too"
                )
        except ValueError as error:
            where = f"line {lines[index]}" if len(lines) == len(rows) else f"grant {index + 1}"
            raise ValueError(f"{where}: {error}") from error
        found[kind][identity] = grant
        labels.add(grant.name)
    return found


def _grant(row: dict[str, Any]) -> tuple[str, str, Grant]:
    for key in row:
        if key not in _KEYS:
            raise ValueError(f"{key!r}: allowed are {', '.join(_KEYS)}")
    kinds = [kind for kind in _WHO if kind in row]
    if len(kinds) != 1:
        raise ValueError(f"{len(kinds)} identities: exactly one of {', '.join(_WHO)} is allowed")
    kind = kinds[0]
    identity = _text(row, kind)
    _check_identity(kind, identity)
    if (kind == "token_sha256") != ("label" in row):
        raise ValueError(
            '"label" is the name of a token: required with token_sha256, and allowed nowhere else'
        )
    name = _text(row, "label") if kind == "token_sha256" else identity
    if kind == "token_sha256" and not _LABEL.fullmatch(name):
        raise ValueError("label: allowed are A-Z a-z 0-9 . _ @ / - and at most 64 of them")
    tenant = _text(row, "tenant") if "tenant" in row else None
    if tenant is not None and (len(tenant) > TENANT_CHARS_MAX or not tenant.isprintable()):
        raise ValueError(f"tenant: allowed are at most {TENANT_CHARS_MAX} characters that can be seen")
    return kind, identity, Grant(name, frozenset(_may(row, tenant)), tenant)


def _check_identity(kind: str, identity: str) -> None:
    if kind == "spiffe" and not is_spiffe(identity.removesuffix("/*")) and not _is_all_of_a_domain(identity):
        raise ValueError('spiffe: allowed are "spiffe://domain/path" and "spiffe://domain/path/*"')
    if kind == "name" and not (0 < len(identity) <= NAME_CHARS_MAX and identity.isprintable()):
        raise ValueError(f"name: allowed are 1 to {NAME_CHARS_MAX} characters that can be seen")
    if kind == "token_sha256" and not _HEX.fullmatch(identity):
        raise ValueError("token_sha256: allowed are 64 digits 0-9 a-f, as sha256sum prints them")


def _is_all_of_a_domain(identity: str) -> bool:
    return identity.endswith("/*") and is_spiffe(identity.removesuffix("*") + "x")


def _may(row: dict[str, Any], tenant: str | None) -> Iterator[Access]:
    roles = row.get("roles")
    if not isinstance(roles, list) or not roles:
        raise ValueError(f"roles: a list of {', '.join(ROLES)} is required")
    for role in roles:
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"roles: {str(role)[:64]!r}: allowed are {', '.join(ROLES)}")
        if tenant is not None and role not in _OF_A_TENANT:
            raise ValueError(
                f"roles: {role!r} is about all tenants: with a tenant allowed are {' and '.join(_OF_A_TENANT)}"
            )
        yield from ROLES[role]


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key}: not a text")
    return value
