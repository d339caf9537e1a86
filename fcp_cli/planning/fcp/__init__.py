"""The solver `fcp`: whole steps by predicted cost, under either sync."""
