"""The loop of a training script under a plan."""
