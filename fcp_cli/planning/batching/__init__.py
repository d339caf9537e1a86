"""Global batches of a dataset: batching, mixing and shuffling."""
