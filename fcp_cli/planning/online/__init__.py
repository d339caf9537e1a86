"""Online planning: plans of a training run whose sequences are only known as they arrive."""
