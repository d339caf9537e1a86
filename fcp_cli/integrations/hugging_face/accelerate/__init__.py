"""Training loops prepared with accelerate, under a plan."""
