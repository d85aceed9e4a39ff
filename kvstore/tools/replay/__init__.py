"""Replay: recorded requests against the engine of the daemon, with bytes that are only counted.

    trace ──▶ Engine.lookup, acquire, reserve, commit, release ──▶ hit ratio
                 └─ index, room, policy: the daemon's own; places: slots without bytes

There is no second implementation of the cache for simulation; what is simulated are the
clock and the bytes.
"""
