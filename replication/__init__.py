"""Regions: what makes a bucket a region, and how every daemon of it learns what is durable.

`replication.region` opens a region, `replication.feed` tells it what became durable, and `replication.tail` keeps the
`replication.catalogue` of a daemon up to date with what all of its writers told.
"""
