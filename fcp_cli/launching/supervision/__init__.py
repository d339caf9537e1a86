"""Runs one node's part of a job, shows it, stops it in time, and names the rank that failed."""
