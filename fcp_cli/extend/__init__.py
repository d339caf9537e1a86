"""Interfaces for packages that extend fcp with solvers, launch targets and integrations, found by entry points.

A package declares `[project.entry-points."fcp.solvers"]` (`fcp.targets`, `fcp.integrations`) in its `pyproject.toml`;
once installed, its names work like built-in ones. Names exported here are public; other modules of `fcp_cli` may
change.
"""
