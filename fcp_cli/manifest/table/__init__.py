"""Columns, header and checks of a manifest's table."""
