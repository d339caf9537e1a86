"""The page of a plan or a run: its sections, charts and figures."""
