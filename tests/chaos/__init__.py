"""Faults on real jobs: each run starts a job, strikes once, and checks how it ends and what a resumed run makes of it."""
