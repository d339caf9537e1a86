"""`fcp demo`: plans of real lengths, their gain in wall time, and the proof that gradients stay, in two minutes."""
