"""Proves on a stranger's node that what a job runs is right there, and how fast it is: one block for an issue.

`run` starts the ranks under a job's own environment and watches over them; `worker` is one of them; each file of
`checks` holds one thing that is looked at.
"""
