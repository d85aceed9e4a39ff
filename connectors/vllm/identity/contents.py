"""Names of a request's blocks: vLLM's hash, and the content of what else a block is computed from.

vLLM's block hash names tokens by content, and some things only by what they are called:

    tokens, cache salt       by content                        ─▶ its hash is the name
    embeddings of a prompt   bytes by content, not their type  ─▶ its hash, and the type
    images, audio, video     by an identifier                  ─▶ its hash, and a digest of what goes into the model
    adapters of LoRA         by name and path                  ─▶ a namespace for each content (`adapters.py`)

An identifier may be a hash of what the user sent, a name that the user gives, one that a picture carries in its metadata,
or a number of this process. So what is digested is what the processor made: all that the model is given in place of these
tokens. The name of a block holds that of every item that begins before its end. Blocks before the first item keep vLLM's hash.

Not named, and so neither looked up nor saved, are requests
* with an item whose tensors are not here (in shared memory, kept in another process), or not what is computed with
  (another engine encodes them, and hands over what has the same identifier),
* with an identifier that stands for something else too, in a request before it or behind it: vLLM's own caches go by it,
  so what is computed may be of the other one,
* that vLLM numbers instead of naming: no other request is ever called so,
* whose prompt mixes tokens and embeddings: a hash does not say which is which.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakSet

# Identifiers of images and the like, of which it is remembered what they stand for.
CONTENTS_KNOWN_MAX = 1 << 16

_NUMBERED = re.compile(r"renderer\d+-mm-\d+-.*")


class Unnamed(Exception):
    """Blocks of this request cannot be distinguished from those of others; the message says why."""


class Mark(NamedTuple):
    """first: token from which on a request's blocks depend on it. digest: of it and of all before it."""

    first: int
    digest: bytes


class Names:
    """The names of a request's blocks, as a sequence like its `block_hashes`, which it follows as they grow.
    unknown: why they are no names, or empty."""

    def __init__(self, request: Any, hash_tokens: int, contents: Contents) -> None:
        self._request, self._hash_tokens, self._contents = request, hash_tokens, contents
        self._marks: list[Mark] = []
        self._unknown = ""
        self._items = -1
        if request.resumable:
            contents.follow(self)

    @property
    def unknown(self) -> str:
        self.refresh()
        self._unknown = self._unknown or self._contents.doubt_about(self._request)
        return self._unknown

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    def __getitem__(self, where: slice) -> list[bytes]:
        self.refresh()
        hashes = self._request.block_hashes
        if not self._marks:
            return list(hashes[where])
        return [self._named(place, hashes[place]) for place in range(len(hashes))[where]]

    def _named(self, place: int, block_hash: bytes) -> bytes:
        end = (place + 1) * self._hash_tokens
        before = bisect_left(self._marks, end, key=lambda mark: mark.first)
        if not before:
            return bytes(block_hash)
        key = self._marks[before - 1].digest
        return hashlib.blake2b(block_hash, key=key, digest_size=len(block_hash)).digest()

    def refresh(self) -> None:
        """A session gets further items while it lasts."""
        items = len(self._request.mm_features)
        if items == self._items:
            return
        self._items = items
        try:
            self._marks, self._unknown = self._contents.marks_of(self._request), ""
        except Unnamed as reason:
            self._unknown = str(reason)


class Contents:
    """What identifiers stand for in this engine. say: for one line in the log about each kind of request."""

    def __init__(self, vllm_config: Any, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: OrderedDict[str, str] = (
            OrderedDict()
        )  # identifier -> digest, "" where it has not one alone
        self._sessions = WeakSet[Names]()
        media = vllm_config.model_config.multimodal_config  # None of a model for text
        is_kept = (
            media is None or vllm_config.cache_config.enable_prefix_caching or media.mm_processor_cache_gb
        )
        self._is_numbered = not is_kept
        transfer = vllm_config.ec_transfer_config
        is_shared = media is not None and media.mm_processor_cache_type == "shm"
        self._is_elsewhere = is_shared or (transfer is not None and bool(transfer.is_ec_consumer))

    def follow(self, names: Names) -> None:
        """Of a session: nobody says when it gets further items, which vLLM may compute in the place of others."""
        self._sessions.add(names)

    def marks_of(self, request: Any) -> list[Mark]:
        """In the order of their tokens. Raises Unnamed, and says so once for each kind."""
        try:
            return self._marks_of(request)
        except Exception as error:
            reason = str(error) if isinstance(error, Unnamed) else f"{type(error).__name__}: {error}"
            self._say(f"such requests are neither looked up nor saved: {reason}")
            raise Unnamed(reason) from error

    def _marks_of(self, request: Any) -> list[Mark]:
        marks: list[Mark] = []
        features = sorted(request.mm_features, key=lambda feature: feature.mm_position.offset)
        digests = self._digests_of(features)
        if request.prompt_embeds is not None:
            if request.prompt_is_token_ids is not None:
                raise Unnamed("a prompt of tokens and embeddings, mixed")
            kind = str(request.prompt_embeds.dtype)
            marks.append(Mark(0, hashlib.sha256(kind.encode()).digest()))
        for feature, what in zip(features, digests, strict=True):
            place = feature.mm_position
            before = marks[-1].digest if marks else b""
            mask = _digest({"embeds": place.is_embed})
            text = f"{place.offset} {place.length} {mask} {what}"
            marks.append(Mark(place.offset, hashlib.sha256(before + text.encode()).digest()))
        return marks

    def _digests_of(self, features: list[Any]) -> list[str]:
        """Of all of them, so that it is noted of each what it stands for. Raises what the first one raises."""
        digests: list[str] = []
        errors: list[Exception] = []
        for feature in features:
            try:
                digests.append(self._digest_of(feature))
            except Exception as error:  # noqa: BLE001 - raised below
                self._known[feature.identifier] = ""
                errors.append(error)
            self._known.move_to_end(feature.identifier)
        while len(self._known) > CONTENTS_KNOWN_MAX:
            self._known.popitem(last=False)
        if errors:
            raise errors[0]
        return digests

    def _digest_of(self, feature: Any) -> str:
        """Of the tensors that the model is given for it."""
        if self._is_numbered or _NUMBERED.fullmatch(feature.identifier):
            raise Unnamed(
                f"vLLM numbers {feature.modality} inputs, with prefix caching and its cache of processed inputs off"
            )
        tensors = {key: element.data for key, element in sorted((feature.data or {}).items())}
        if self._is_elsewhere or not _has_tensors(tensors):
            raise Unnamed(f"the content of {feature.modality} inputs is not to be seen")
        digest = _digest({"modality": feature.modality, "data": tensors})
        if self._known.setdefault(feature.identifier, digest) != digest:
            raise Unnamed(_several(feature))
        return digest

    def doubt_about(self, request: Any) -> str:
        """Why a request that had names has none any more, or empty."""
        for names in self._sessions:
            names.refresh()
        for feature in request.mm_features:
            if self._known.get(feature.identifier) == "":
                self._say(f"such requests are neither looked up nor saved: {_several(feature)}")
                return _several(feature)
        return ""


def _several(feature: Any) -> str:
    return f"one identifier stands for several {feature.modality} inputs"


def _digest(items: dict[str, Any]) -> str:
    """Of nested plain values and tensors, by vLLM's own hasher of such."""
    from vllm.multimodal.hasher import MultiModalHasher

    return str(MultiModalHasher.hash_kwargs(_ALGORITHM, **items))


def _has_tensors(value: Any) -> bool:
    """Whether there are tensors in it, and nothing else that is not plain. Raises Unnamed for anything else: what is not
    known to be its own content may be a place in memory, or a mark that the content is kept elsewhere."""
    import numpy as np
    import torch

    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_has_tensors, value)) > 0  # looks at all of them
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return True
    if isinstance(value, str | bytes | int | float):
        return False
    raise Unnamed(f"{type(value).__name__} among the inputs of the model")


_ALGORITHM: Any = "blake3" if find_spec("blake3") else "sha256"  # vLLM's default, and five times as fast
