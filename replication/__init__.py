"""Regions: what makes a bucket a region, and how every daemon of it learns what is durable.

`replication.formats.region` opens a region, `replication.feed.feed` tells it what became durable, and `replication.feed.tail` keeps the
`replication.catalogue.catalogue` of a daemon up to date with what all of its writers told.
"""
