"""Attention of a group over its shards: rings, windows with halos, and Ulysses."""
