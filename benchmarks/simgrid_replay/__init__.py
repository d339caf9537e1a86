"""Plans replayed by SimGrid, an independent engine in which messages share links: `make simgrid`."""
