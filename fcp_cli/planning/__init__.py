"""Global batches to micro-batches: solvers, allocation, placement, bounds; `published/` has one file per peer."""
