"""Follow a plan that is made while the training runs, from sequences that are known when they come."""
