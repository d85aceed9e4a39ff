"""A subscriber to the KV events of one daemon, as a router has one: `mirror.py` keeps the state, `subscriber.py` the sockets."""
