"""Measurements of each step on every rank, their way to rank 0, and the one place where they are written."""
