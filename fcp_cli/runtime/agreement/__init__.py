"""Settings and data that all ranks compare, before the first step or in a step."""
