"""Chunks of models in a bucket: there or not, copied, collected."""
