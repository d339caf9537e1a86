"""Compiled kernels of the planner; the hash of all their sources is the key of the on-disk cache."""
