"""The files of a run directory, their writers and readers: launch record, owner, metrics, checkpoint headers."""
