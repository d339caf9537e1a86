"""The cost model: what a pack of sequences costs on a group of ranks, as pure formulas over a YAML profile."""
