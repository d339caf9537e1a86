"""The steps of a plan file as one rank sees them, and the data of its micro-batches."""
