"""The interfaces of packages that extend fcp: solvers, launch targets and integrations, found by entry points.

A package declares `[project.entry-points."fcp.solvers"]` (`fcp.targets`, `fcp.integrations`) in its `pyproject.toml`;
installed beside fcp, its names work wherever fcp's own do. The names exported here are public; what they import
from elsewhere in `fcp_cli` may move.
"""
