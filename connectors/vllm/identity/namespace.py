"""What must be equal for stored KV to be used again, and its digest: the namespace.

vLLM's block hash names tokens, adapter, images and cache salt. It says nothing of the model or of how KV lies in memory,
so all of that is here:

    identity (scheduler)   format, vLLM release, digest of the weights, the engine's whole configuration
                           (connectors/vllm/identity/configuration.py), hash algorithm and seed, tenant, epoch
    facts (each shard)     attention backends, KV layout, block bytes, the pieces of a column,
                           layer names and specs of the group

    digest = first 16 bytes of SHA-256 over the sorted fields, less the labels

The configuration is there as one digest of all that counts; what is not vLLM's own default is written out as well, so
that `kvstore explain --engines` can say what separates two namespaces. Labels (the model's name and revision)
are for people, reports and rules: what the first engine called it. What it is follows from contents.

vLLM's release (major.minor) is there because backends order K and V inside a block as they like, and no field shows when
one changes its mind: a new minor release starts cold, patch releases share, builds between releases do not.

A namespace is that of a whole engine: its records have a column for each *shard*. Ranks that hold the same bytes (MLA, or
fewer KV heads than ranks) have the same shard number: one of them stores, and all load the same column.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.device import Blocks
from connectors.vllm.identity.canonical import Unknowable, text_of
from connectors.vllm.identity.configuration import configuration
from connectors.vllm.messages import GroupFacts

CONNECTOR_FORMAT = 3  # part of every namespace: raise it when the bytes of a record change their meaning

DIGEST_BYTES = 16
FIELD_CHARS_MAX = 1000  # longer values are replaced by their digest
SETTING_CHARS_MAX = 80  # of the configuration
SETTINGS_CHARS_MAX = 3500  # of all that are written out; those of one object are FIELD_CHARS_MAX at most
_RELEASED = re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?")  # 0.33.1, 0.33.0+cpu
LABELS = frozenset({"model", "revision"})


def space_spec(
    fields: Mapping[str, str], column_bytes: Sequence[int], block_tokens: int
) -> tuple[bytes, dict[str, str]]:
    """The digest that names the namespace of these fields, and all that it is of, as people read it. Equal
    fields, in any order and with any labels, give equal digests."""
    sizes = {"column bytes": _short(str(list(column_bytes))), "record bytes": str(sum(column_bytes))}
    exact = {**fields, **sizes, "block tokens": str(block_tokens)}
    counts = {name: value for name, value in exact.items() if name not in LABELS}
    text = json.dumps(counts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES], exact


def joined_facts(facts: Mapping[int, GroupFacts]) -> dict[str, str]:
    """Which shards a group has, in the order of its columns, and what they say of it: what all say, or a digest
    of all."""
    names = next(iter(facts.values())).fields
    joined = {"shards": _short(str(list(facts)))}
    for name in names:
        said = [shard.fields[name] for shard in facts.values()]
        joined[name] = said[0] if len(set(said)) == 1 else _digest(json.dumps(said))
    return joined


def identity_fields(
    vllm_config: Any, tenant: str, weights: str, hash_seed: bytes, epoch: str, configured: Mapping[str, str]
) -> dict[str, str]:
    """What is the same on every rank of an engine. hash_seed: vLLM's NONE_HASH. configured: what `configured_fields` said
    when the engine started."""
    from vllm import __version__ as vllm_version

    fields = {
        "format": str(CONNECTOR_FORMAT),
        "vllm": release_of(vllm_version),
        **model_fields(vllm_config),
        "weights": weights,
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "hash seed": hashlib.sha256(hash_seed).hexdigest()[:32],
        "tenant": tenant,
        "epoch": epoch,
    }
    return {name: _short(value) for name, value in fields.items()} | dict(configured)


def configured_fields(vllm_config: Any) -> dict[str, str]:
    """The digest of all settings that count, and those written out that are not vLLM's own defaults: by the object that
    they are of, the shortest ones first where they are too many. Raises Unknowable."""
    try:
        settings, unusual = configuration(vllm_config)
    except Unknowable:
        raise
    except Exception as error:  # an engine starts all the same
        raise Unknowable(f"its configuration cannot be read: {type(error).__name__}: {error}") from error
    written: dict[str, dict[str, Any]] = {}
    room = SETTINGS_CHARS_MAX
    for name in sorted(unusual, key=lambda name: (len(settings[name]), name)):
        value = settings[name]
        if len(value) > SETTING_CHARS_MAX:
            value = json.dumps(_digest(value))
        room -= len(name) + len(value) + 4
        if room >= 0:
            head, _, rest = name.partition(".")
            part = written.setdefault(head, {})
            part[rest] = json.loads(value)
            if len(text_of(part)) > FIELD_CHARS_MAX:
                del part[rest]
    whole = _digest(json.dumps(settings, sort_keys=True))
    return {"configuration": whole, **{name: text_of(part) for name, part in sorted(written.items())}}


def model_fields(vllm_config: Any) -> dict[str, str]:
    """What the model is called. An engine that loads other weights from files learns so here too, where its workers
    share its process: for a name that stays, ask at the start."""
    model = vllm_config.model_config
    return {"model": _short(model_name(model.model)), "revision": _short(str(model.revision))}


def rank_facts(
    vllm_config: Any, index: int, spec: Any, layers: Sequence[str], blocks: Blocks, backends: Sequence[str]
) -> GroupFacts:
    """What one rank knows of KV group `index`. layers: names in the order they have in a record."""
    fields = {
        "group": str(index),
        "attention": ", ".join(sorted(backends)),
        "layout": str(vllm_config.cache_config.kv_cache_layout),
        "pieces": _digest(json.dumps([[run.storage, run.length] for run in blocks.runs])),
        "layers": _digest(json.dumps(list(layers))),
        "layer count": str(len(layers)),
        "spec": repr(spec),
    }
    return GroupFacts(blocks.record_bytes, {name: _short(value) for name, value in fields.items()})


def model_name(model: str) -> str:
    """A local directory by its last name, so that where it is mounted does not matter."""
    return Path(model).resolve().name if os.path.exists(model) else model


def release_of(version: str) -> str:
    """major.minor of a release; of a build in between (dev, rc) the whole version: two of these may lay out KV in two ways."""
    found = _RELEASED.fullmatch(version)
    return found[1] if found is not None else version


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _short(text: str) -> str:
    return text if len(text) <= FIELD_CHARS_MAX else _digest(text)
