"""Runs and monitors one node's ranks: shows output, stops them gracefully, and names the rank that failed."""
