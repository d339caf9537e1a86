"""One check per file. Every rank runs every check, in one order; rank 0's result counts."""
