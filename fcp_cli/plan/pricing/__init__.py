"""Predicted seconds of the micro-batches, waves and steps of a plan."""
