"""Seals: proof that what is read from a bucket was written with a key of the deployment.

    small objects   magic (8) │ key id (4) │ tag (16) │ ciphertext     AES-SIV (RFC 5297) over the content, bound to the region
                                                                       and the object's own name; names in it cannot be read
    packs           their header the same way, the tag being the pack's id (tiers/packs/packs.py); each record has a tag in it
    records         GMAC (AES-256) under a key of this pack alone: any of them is verified without the others
    chunks          none: the manifest, which is sealed, names them by SHA-256

A writer seals with the first key of the file; a reader takes any of them. AES-SIV is deterministic, and needs no nonce:
the same content under the same name is the same object, as without a key. A key of a pack follows from all that its header says,
and from a checksum of what is stored; the nonce of a record is its place in it: no nonce is used for two contents.

Measured on one core (Xeon with AES-NI and SHA-NI, 2 MiB at a time), in GB/s: GMAC 24, blake3 7.9, Poly1305 6.5, HMAC-SHA256 1.9,
BLAKE2b 1.1; AES-SIV 0.9.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

from tiers.constants import KEY_ID_BYTES, TAG_BYTES

Bytes = bytes | bytearray | memoryview

_PIECE_BYTES: Final = 256 << 20  # of a record, tagged at once: AES-GCM takes no more than 2 GiB


class Sealed(NamedTuple):
    """key_id: of the key it was sealed with. tag: follows from all of it, and from what it is bound to."""

    key_id: bytes
    tag: bytes
    ciphertext: bytes


class Unsealed(Exception):
    """This was not written with a key of this deployment, or not under this name. is_of_other_key: it says that it was sealed
    with a key that is not in the file, or by a later version; whether that is true cannot be known here."""

    def __init__(self, why: str, is_of_other_key: bool = False) -> None:
        super().__init__(why)
        self.is_of_other_key = is_of_other_key


class _Key:
    """One line of the file."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # nothing of it without a key

        self.id = _derived(secret, b"id", KEY_ID_BYTES)
        self.siv = AESSIV(_derived(secret, b"objects", 64))
        self.records = _derived(secret, b"records", 64)


class Seals:
    """The keys of a deployment. Any thread."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """The first one seals, all of them verify."""
        assert secrets
        self._keys = [_Key(secret) for secret in secrets]

    @property
    def key_id(self) -> bytes:
        """Of the key that seals."""
        return self._keys[0].id

    def seal(self, bound_to: str, content: Bytes) -> Sealed:
        key = self._keys[0]
        sealed = key.siv.encrypt(
            b"\0" + bytes(content), [bound_to.encode()]
        )  # no empty content can be sealed
        return Sealed(key.id, sealed[:TAG_BYTES], sealed[TAG_BYTES:])

    def open(self, bound_to: str, sealed: Sealed) -> bytes:
        """The content. Raises Unsealed."""
        from cryptography.exceptions import InvalidTag

        key = self._key(sealed.key_id)
        try:
            return key.siv.decrypt(sealed.tag + sealed.ciphertext, [bound_to.encode()])[1:]
        except (InvalidTag, ValueError) as error:
            raise Unsealed("its seal is not one of this object: forged, damaged, or moved") from error

    def tagger(self, about: bytes, key_id: bytes = b"") -> Tagger:
        """Tags the records of one pack. about: all that it is, but the tags. key_id: b"": that of the key that seals. Raises
        Unsealed."""
        key = self._key(key_id) if key_id else self._keys[0]
        return Tagger(key.id, hmac.digest(key.records, about, "sha256"))

    def _key(self, key_id: bytes) -> _Key:
        for key in self._keys:
            if key.id == key_id:
                return key
        raise Unsealed(f"sealed with key {key_id.hex()}, which is not in key_file", is_of_other_key=True)


class Tagger:
    """Of one pack."""

    def __init__(self, key_id: bytes, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.key_id = key_id
        self._gcm = AESGCM(key)

    def tag(self, index: int, stored: Bytes) -> bytes:
        """Of a record, as it is stored, at its place in the pack."""
        view = memoryview(stored)
        if len(view) <= _PIECE_BYTES:
            return self._tag(index, 0, view)
        starts = range(0, len(view), _PIECE_BYTES)
        tags = [self._tag(index, 1 + at // _PIECE_BYTES, view[at : at + _PIECE_BYTES]) for at in starts]
        return self._tag(index, 0, b"".join(tags) + len(view).to_bytes(8, "big"))

    def is_true(self, index: int, stored: Bytes, tag: bytes) -> bool:
        return hmac.compare_digest(self.tag(index, stored), tag)

    def _tag(self, index: int, piece: int, content: Bytes) -> bytes:
        nonce = index.to_bytes(8, "big") + piece.to_bytes(4, "big")
        return self._gcm.encrypt(nonce, b"", content)


def _derived(secret: bytes, use: bytes, size_bytes: int) -> bytes:
    """Keys for different uses have nothing in common."""
    return hashlib.blake2b(
        use, digest_size=size_bytes, key=hashlib.sha512(secret).digest(), person=b"kvstore regions"
    ).digest()
