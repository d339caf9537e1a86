"""Runs a plan event by event against a cost profile: what each rank does when, and how long steps take."""
