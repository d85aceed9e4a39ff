"""Which namespaces a command about rules means: people name them by a beginning of the digest, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from kvstore.constants import TENANT_CHARS_MAX
from kvstore.errors import BadRequest, NotFound
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.retention.rules import Book, Pin, Ttl, pieces
from kvstore.steps import Steps


def one_namespace(selector: str, namespaces: NamespaceRegistry, book: Book) -> bytes:
    """The digest that begins with the selector; the only one there is where the selector is empty.

    Raises BadRequest, NotFound.
    """
    names = {namespace.digest.hex() for namespace in namespaces}
    names.update(rule.namespace for rule in book.rules() if rule.namespace)
    beginning = selector.lower()
    known = {name for name in names if name.startswith(beginning)}
    found = nsmallest(2, known)
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if not found:
        raise NotFound(f"namespace {selector or '(any)'}: none is known here; `kvstore status` lists them")
    more = f"{len(known)} namespaces, as {found[0]} and {found[1]}"
    raise BadRequest(
        f"namespace {selector} may be any of {more}: name one"
        if selector
        else f"{more}, are known: name one with --namespace"
    )


def prefix_steps(
    selector: str,
    block_hash: bytes,
    set_before: Sequence[Pin | Ttl],
    namespaces: NamespaceRegistry,
    book: Book,
) -> Steps[list[bytes]]:
    """The digests of the namespaces of a prefix: the named one, else all that hold its last block or have a
    rule of `set_before` about it, else the only one. Raises BadRequest, NotFound."""
    if not block_hash:
        raise BadRequest("an empty block hash: the hash of the last block of a prefix is required")
    ruled = [bytes.fromhex(rule.namespace) for rule in set_before if rule.block_hash == block_hash.hex()]
    found: list[bytes] = []
    if selector:
        found = [digest for digest in ruled if digest.hex().startswith(selector.lower())]
    elif ruled:
        found = ruled
    else:
        for number, some in enumerate(pieces(list(namespaces))):
            if number:
                yield
            found += [namespace.digest for namespace in some if namespace.holds(block_hash)]
    found = found or [one_namespace(selector, namespaces, book)]
    for number, some_digests in enumerate(pieces(found)):
        if number:
            yield
        for namespace in filter(None, map(namespaces.of_key, some_digests)):
            if namespace.hash_bytes != len(block_hash):
                raise BadRequest(
                    f"block hash of {len(block_hash)} bytes: namespace {namespace.digest.hex()} has {namespace.hash_bytes}"
                )
    return found


def require_tenant_alone(tenant: str, selector: str, block_hash: bytes = b"") -> None:
    """Raises BadRequest where a rule of a tenant is about something else as well, or its name is too long."""
    if selector or block_hash:
        raise BadRequest("a tenant together with a namespace or a prefix: only one of them is allowed")
    if len(tenant) > TENANT_CHARS_MAX:
        raise BadRequest(f"tenant of {len(tenant)} characters: at most {TENANT_CHARS_MAX} are allowed")
