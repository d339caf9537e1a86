"""The cost model: the price of a pack of sequences on a group of ranks, as pure formulas over a YAML profile."""
