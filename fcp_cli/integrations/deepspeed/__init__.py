"""Training loops around a DeepSpeed engine under a plan."""
