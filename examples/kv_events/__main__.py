"""Follow what a daemon holds, as a router does: one line whenever it changes.

    kvstore serve --set events.endpoint=tcp://127.0.0.1:5557 --set events.replay_endpoint=tcp://127.0.0.1:5558 &
    python -m examples.kv_events tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

A subscriber that comes late, or misses messages, asks for what it lacks: the state is exact whenever a line is printed.
docs/events.md has the protocol, which is that of vLLM's own KV events.
"""

from __future__ import annotations

import sys

from examples.kv_events.subscriber import Subscriber


def main(endpoint: str, replay_endpoint: str) -> None:
    subscriber = Subscriber(endpoint, replay_endpoint)
    shown = None
    while True:
        if not subscriber.step(timeout_s=1.0):
            continue  # something is missing, or the daemon is silent: what is known may be wrong
        held = {
            f"{tier} {namespace[:8]}": len(blocks)
            for (tier, namespace), blocks in sorted(subscriber.held.items())
            if blocks
        }
        if held != shown:
            shown = held
            print(
                ", ".join(f"{where}: {count} blocks" for where, count in held.items()) or "nothing",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(
            "usage: python -m examples.kv_events ENDPOINT REPLAY_ENDPOINT, as in [events] of the daemon's configuration"
        )
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
