"""Bounded readers of untrusted files: JSON and YAML, Parquet footers, tars. Every failure is one line."""
