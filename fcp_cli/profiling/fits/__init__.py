"""Coefficients fitted to measurements, and to the metrics of real runs."""
