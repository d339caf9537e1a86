"""Cost model: predicted seconds of a pack on a group of ranks, as pure formulas over a YAML profile."""
