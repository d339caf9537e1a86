"""A job as one value, and what is derived from it: environment, commands, the record of a launch."""
