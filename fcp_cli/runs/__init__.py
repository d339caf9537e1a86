"""What a run directory holds, and who writes and reads it: launch record, heartbeat, metrics, checkpoint headers."""
