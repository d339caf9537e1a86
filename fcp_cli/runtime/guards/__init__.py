"""Checks during a training loop that abort a job which would train incorrectly."""
