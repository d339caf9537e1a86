"""Strategies of jobs without fcp (static grids, padding, packing), and helpers shared by all strategies."""
