"""Imported for what it does: it loads the compiled planner, as every planner process of a job does before its first plan."""

from fcp_cli.planning.online import load_planner

load_planner()
