"""Metadata of a plan: settings, masks, mixture, refits, hash, and the command that reproduces it."""
