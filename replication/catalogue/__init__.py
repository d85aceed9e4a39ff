"""What is durable in a region, as one node knows it: by pack, by block, by model."""
