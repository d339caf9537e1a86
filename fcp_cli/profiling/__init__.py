"""Finds the coefficients of a cost profile: from data sheets, by measurement on this machine, or from real runs."""
