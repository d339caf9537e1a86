"""The interfaces of packages that extend fcp: solvers, launch targets and integrations, found by entry points.

A package declares `[project.entry-points."fcp.solvers"]` (`fcp.targets`, `fcp.integrations`) in its `pyproject.toml`;
once installed, its names work anywhere fcp's own do. The names exported here are public; modules that they import
from elsewhere in `fcp_cli` may move.
"""
