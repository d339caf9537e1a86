"""Exact simulation of steps on pipelines; the hash of its sources is the key of its compiled kernels on disk."""
