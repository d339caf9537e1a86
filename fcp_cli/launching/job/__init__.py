"""A job as one value, and its environment, commands and launch record."""
