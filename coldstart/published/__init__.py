"""Models in a bucket: cut into chunks, published, checked, collected."""
