"""Ranks of a job: how they join, open peer connections, and send and receive."""
