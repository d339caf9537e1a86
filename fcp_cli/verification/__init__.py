"""`fcp verify`: replays steps of a plan with a small model and compares gradients with one process."""
