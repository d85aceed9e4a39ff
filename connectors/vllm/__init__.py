"""vLLM's connector, where vLLM is a release that it is made for; otherwise one that does nothing, and one line says so.

    vLLM imports this module by its path and takes `KVStoreConnector`
      ├─ a release from VLLM_FIRST to VLLM_LAST  ─▶ connectors/vllm/connector.py
      └─ another one, or one that lacks a name   ─▶ connectors/vllm/declining.py

An engine never fails to start because of its release: it starts without a store.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm

from connectors.vllm import declining
from connectors.vllm_plugin import register

_log = logging.getLogger("vllm.kvstore")


def _choose() -> Any:
    reason = declining.unsupported(getattr(vllm, "__version__", None))
    if not reason:
        try:
            from connectors.vllm.connector import KVStoreConnector as Chosen

            return Chosen
        except ImportError as error:
            reason = f"vLLM {vllm.__version__} lacks what this connector needs ({error})"
    _log.warning("kvstore: %s: nothing is stored or loaded", reason)
    return declining.KVStoreConnector


if TYPE_CHECKING:
    from connectors.vllm.connector import KVStoreConnector as KVStoreConnector
else:
    KVStoreConnector = _choose()

register()  # MultiConnector asks for our statistics by name, also where we were found by our module's path
