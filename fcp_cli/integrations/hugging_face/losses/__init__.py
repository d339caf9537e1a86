"""Losses of the Trainer and of TRL, summed over the tokens of a global batch."""
