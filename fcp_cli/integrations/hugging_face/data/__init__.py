"""Reads the rows of a script's own data set through its own collator, for a plan."""
