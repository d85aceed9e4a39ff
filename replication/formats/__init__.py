"""Every small object of a bucket: what it says, how it is written, and the one reader that believes none of it."""
