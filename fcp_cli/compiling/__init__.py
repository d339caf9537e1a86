"""Compilation of inner loops of the planner and the pipeline simulation."""
