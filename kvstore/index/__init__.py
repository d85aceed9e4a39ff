"""What this node knows: blocks, the forest of their prefixes, and the namespaces they belong to."""
