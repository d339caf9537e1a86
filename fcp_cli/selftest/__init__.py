"""Checks on a user's node that a job's kernels and messages are correct, and how fast they are; output for an issue.

`run` starts and monitors ranks under a job's environment; `worker` is a rank; each file in `checks` checks one
property.
"""
