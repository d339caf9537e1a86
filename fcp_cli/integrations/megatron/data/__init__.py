"""Megatron's samples, cut to the shards of a plan, and the batches that its scripts are given of them."""
