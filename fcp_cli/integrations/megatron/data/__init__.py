"""Megatron's samples, sliced to the shards of a plan, and the batches made of them for scripts."""
