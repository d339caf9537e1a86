"""Commands of `fcp`, a file each: they parse options, call the rooms below, and print."""
