"""Tests on a user's node that a job's kernels and messages are correct there, and how fast: one block for an issue.

`run` starts the ranks under a job's own environment and watches over them; `worker` is one of them; each file of
`checks` tests one property.
"""
