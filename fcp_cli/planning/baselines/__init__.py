"""Strategies of jobs without fcp: static grids, padding, packing; and helpers that strategies share."""
