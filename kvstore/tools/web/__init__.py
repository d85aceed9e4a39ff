"""`kvstore web`: the daemon seen from outside, over HTTP: metrics, health, a page."""
