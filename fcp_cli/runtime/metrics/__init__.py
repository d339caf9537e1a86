"""Measurements of each step: taken on every rank, collected and written by rank 0."""
