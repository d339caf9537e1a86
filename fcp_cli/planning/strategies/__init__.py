"""Strategies of other systems, one file each, priced and planned like fcp's own for `fcp compare` and `--solver`."""
