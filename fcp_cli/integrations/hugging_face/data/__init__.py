"""Rows of a script's own data set through its own collator, as a plan needs them."""
