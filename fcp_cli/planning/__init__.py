"""From global batches to micro-batches: solvers, allocation, placement, bounds; one file per peer in `strategies/`."""
