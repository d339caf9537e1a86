"""`fcp verify`: replay steps of a plan with a small model and compare gradients with one process."""
