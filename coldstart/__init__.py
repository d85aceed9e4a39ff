"""Models: published into a region's bucket, preloaded on nodes, loaded by engines, verified on every hop.

files ─cut─▶ chunks + manifest in the bucket ─preload─▶ files on NVMe, slabs of the arena ─load─▶ tensors of an engine
"""
