"""Steps of a plan file from one rank's view, and the data of its micro-batches."""
