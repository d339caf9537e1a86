"""One thing to look at per file. Every rank runs every check, in one order; what rank 0 returns counts."""
