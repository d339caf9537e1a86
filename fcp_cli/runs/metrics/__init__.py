"""The metrics file of a run: its records, written and read."""
