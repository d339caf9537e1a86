"""Global batches of a dataset: drawn, mixed and shuffled."""
