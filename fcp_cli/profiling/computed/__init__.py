"""Coefficients that follow from a description of model and cluster, without a measurement."""
