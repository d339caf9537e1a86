"""Compiles inner loops of the planner and of pipelines."""
