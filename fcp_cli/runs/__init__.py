"""The files of a run directory, their writers and readers: launch record, heartbeat, metrics, checkpoint headers."""
