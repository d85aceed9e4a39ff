"""`kv_transfer_params` of ours: what a prefill worker says to a decode worker through a proxy or router.

    proxy ── {"do_remote_decode": true, …} ─▶ prefill worker ── {"kvstore": {"daemon": …, "tokens": …}} ─▶ proxy
    proxy ── the same, unchanged ─▶ decode worker: so much of the prompt is stored, or about to be

Blocks are found by their hashes, so nothing here is needed for correctness; it says how much is worth a wait. All
is under one key of ours: MultiConnector puts the keys of its children together, and fails where two are equal. What
comes in is of clients: anything else than what `promise` makes is ignored.
"""

from __future__ import annotations

from typing import Any

KEY = "kvstore"


def wants_promise(params: Any) -> bool:
    """Whether the request goes on elsewhere: at a decode worker, or at the next turn's prefill worker."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode") or KEY in params)


def promise(daemon: str, tokens: int) -> dict[str, Any]:
    """So many leading tokens are stored at this daemon, or about to be."""
    return {KEY: {"daemon": daemon, "tokens": tokens}}


def promised_tokens(params: Any, daemon: str) -> int:
    """How many leading tokens this daemon was promised; 0 where nothing that we understand says so."""
    sent = params.get(KEY) if isinstance(params, dict) else None
    if not isinstance(sent, dict) or not daemon or sent.get("daemon") != daemon:
        return 0
    tokens = sent.get("tokens")
    return tokens if type(tokens) is int and tokens > 0 else 0


def another_brings_it(params: Any) -> bool:
    """Whether another connector, such as NIXL's, fetches the prompt from the prefill worker."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))
