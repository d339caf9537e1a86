"""Checks while a loop runs, which abort a job that would train wrong."""
