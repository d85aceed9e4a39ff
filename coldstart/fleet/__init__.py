"""What a cold start is made of besides the weights: plans, compile caches, accelerators, buckets, volumes."""
