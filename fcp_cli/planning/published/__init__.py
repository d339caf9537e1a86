"""One file per published strategy, written from its description."""
