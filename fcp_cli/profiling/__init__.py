"""Finds the coefficients of a cost profile: from figures alone, by measurement on this machine, or from real runs."""
