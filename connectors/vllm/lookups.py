"""What the daemon holds of a prompt: one question for each start of a request, and what is owed where no answer came.

Full-attention groups are asked together: a hit ends at the first block that one of them lacks. Groups with a
sliding window or a state need only the end of a prefix: one more question for all of them shortens the hit. It names the whole
prompt, whatever the others hold, so that the daemon counts how often these groups are wanted, too.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Any

from connectors import constants as limits
from connectors.transfer.link import Line
from connectors.transfer.prefill import PrefillSpeed
from connectors.vllm.geometry import Plan
from connectors.vllm.stats import Tally
from connectors.vllm.tracked import Hit, Tracked
from connectors.vllm.transfer_params import another_brings_it, promised_tokens

LOOKUP_SPACES_MAX = 64  # namespaces of one lookup
# What a question about windows says of its request.
WINDOWS_ASKING = ("ticket", "local_tokens", "prefill_tokens_per_s", "lasting")


class Lookups:
    """computes_last: whether a hit must leave one token to compute."""

    def __init__(self, line: Line, tally: Tally, prefill: PrefillSpeed, computes_last: bool) -> None:
        self._line, self._tally, self._prefill = line, tally, prefill
        self._computes_last = computes_last
        self._tickets = itertools.count(int.from_bytes(os.urandom(5), "little") << 20)  # no other engine's

    def look_up(self, plan: Plan, tracked: Tracked, local_tokens: int) -> Hit:
        """Ask the daemon. Raises what the client raises; vLLM gets "nothing" then, and for as long."""
        request = tracked.request
        tracked.hit = hit = Hit(local_tokens, 0, request.num_tokens, time.monotonic() + limits.LOOKUP_FRESH_S)
        self._line.settle()
        if not tracked.counted:
            self._tally.add("lookup_tokens", max(0, request.num_tokens - local_tokens))
        self.count(tracked, "lookups")
        if not tracked.ticket:
            tracked.again = self._was_asked_for(plan, tracked)
        tracked.looked_up = tracked.ticket = tracked.ticket or next(self._tickets)
        asking = {
            "ticket": tracked.ticket,
            "tokens": request.num_tokens,
            "local_tokens": min(local_tokens, request.num_tokens),
            "prefill_tokens_per_s": self._prefill.tokens_per_s,
            "again": tracked.again,
            "trace": traceparent(request),
            "lasting": plan.lasting,
        }
        usable = request.num_tokens - (self._computes_last or plan.computes_last)
        try:
            held, reach = self._held_tokens(plan, tracked, usable, asking)
        except Exception:
            self._owe(plan, tracked, local_tokens)
            raise
        for position, group in enumerate(plan.groups):
            tracked.offered[position] = group.blocks_in(held)
        hit.tokens = max(0, held - local_tokens)
        if not another_brings_it(request.kv_transfer_params):
            there = local_tokens + hit.tokens
            promised = min(usable, promised_tokens(request.kv_transfer_params, self._line.client.instance))
            hit.writing = max(0, reach - there)
            hit.promised = max(0, promised - promised % plan.align_tokens - there)
        return hit

    def _was_asked_for(self, plan: Plan, tracked: Tracked) -> bool:
        """Whether daemons know the request by another ticket: it was preempted, or all of it was prefilled elsewhere."""
        request, client = tracked.request, self._line.client
        if tracked.looked_up:
            return True
        params = request.kv_transfer_params
        whole = request.num_tokens - request.num_tokens % plan.align_tokens
        if params and not client.connected:
            client.ping()  # before the first call it is not known which daemon this is
        return another_brings_it(params) or 0 < whole <= promised_tokens(params, client.instance)

    def count(self, tracked: Tracked, outcome: str) -> None:
        """Once for each start of a request, however often vLLM asks while it waits."""
        if not tracked.counted:
            self._tally.add(outcome)
            tracked.counted = True

    def _owe(self, plan: Plan, tracked: Tracked, local_tokens: int) -> None:
        """A lookup was not answered in time, and may count in the daemon's accounts as if it had been."""
        ticket, tracked.ticket = tracked.ticket, 0
        if not plan.full:
            return
        group = plan.full[0]
        first = local_tokens // group.block_tokens
        if hashes := plan.hashes(group, tracked.names, first, first + 1):
            self._line.owe(ticket, local_tokens, tracked.columns[group.index].space, hashes[0])

    def _held_tokens(
        self, plan: Plan, tracked: Tracked, usable: int, asking: dict[str, Any]
    ) -> tuple[int, int]:
        """How many tokens can be loaded, and how many when what is being written is there."""
        held = reach = found = min(usable, len(tracked.names) * plan.hash_tokens)
        if plan.full:
            held, reach = self._full_tokens(plan, tracked, found, asking)
            found = held
        held, reach = (tokens - tokens % plan.align_tokens for tokens in (held, reach))
        if plan.windowed and (reach or plan.lasting):
            held, reach = self._windowed_tokens(plan, tracked, usable, (held, reach), asking)
        if held < found and plan.full:
            self._line.client.settle(asking["ticket"], held)
        return held, reach

    def _full_tokens(
        self, plan: Plan, tracked: Tracked, tokens: int, asking: dict[str, Any]
    ) -> tuple[int, int]:
        """Groups of equal block size are asked about in one call: all of them must hold a block."""
        more = False  # the first lookup of a request opens its account, the others can only lower it
        held = reach = tokens
        for block_tokens in sorted({group.block_tokens for group in plan.full}):
            groups = [group for group in plan.full if group.block_tokens == block_tokens]
            count = min(reach // block_tokens, limits.LOOKUP_HASHES_MAX)
            hashes = plan.hashes(groups[0], tracked.names, 0, count)
            spaces = [tracked.columns[group.index].space for group in groups]
            for start in range(0, len(spaces), LOOKUP_SPACES_MAX):
                if not hashes:
                    return 0, 0
                some = spaces[start : start + LOOKUP_SPACES_MAX]
                found = self._line.client.lookup(some, hashes, **asking, more=more)
                held = min(held, found * block_tokens)
                hashes, more = hashes[: found + found.writing], True
            reach = min(reach, len(hashes) * block_tokens)
        return min(held, reach), reach

    def _windowed_tokens(
        self, plan: Plan, tracked: Tracked, usable: int, found: tuple[int, int], asking: dict[str, Any]
    ) -> tuple[int, int]:
        """The longest hits whose last window every windowed group holds, or will; never less than the window. found: in the
        other groups."""
        unit = math.gcd(*(group.block_tokens for group in plan.windowed))
        step = unit // plan.hash_tokens
        count = min(usable // unit, len(tracked.names) // step, limits.LOOKUP_HASHES_MAX)
        if not count:
            return 0, 0
        held = self._line.client.windows(
            [(tracked.columns[group.index].space, group.window or 0) for group in plan.windowed],
            list(tracked.names[step - 1 : count * step : step]),
            hash_tokens=unit,
            align_tokens=plan.align_tokens,
            held_tokens=found[0],
            reach_tokens=found[1],
            **{name: asking[name] for name in WINDOWS_ASKING},
        )
        return int(held), held + held.writing


def traceparent(request: Any) -> str:
    """The trace that a request is part of: what came with it over HTTP, from any client. vLLM passes it on where it exports
    traces itself."""
    found = (request.trace_headers or {}).get("traceparent", "")
    return found if isinstance(found, str) else ""
