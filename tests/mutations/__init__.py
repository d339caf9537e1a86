"""Faults put into a copy of the runtime, to see that `fcp verify` or a short test finds each: `make mutations`."""
