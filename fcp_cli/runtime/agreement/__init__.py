"""Settings that all ranks compare before the first step, or in it."""
