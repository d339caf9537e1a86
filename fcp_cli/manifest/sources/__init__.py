"""Data that a manifest is built from: one file per kind, each with its counting and its reading side by side."""
