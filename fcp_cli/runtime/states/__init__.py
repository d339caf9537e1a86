"""Layers that carry a state along a sequence: linear attention, state spaces, convolutions."""
