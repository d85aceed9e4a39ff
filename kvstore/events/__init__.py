"""KV events: what the owned levels hold, published to routers as vLLM publishes what its GPU cache holds.

    residency ─▶ journal ─▶ stream ─▶ subscribers        one event for each block that comes or goes
                              ╰─▶ answers ─▶ who missed something: a replay, or everything that is held

docs/events.md is the protocol.
"""
