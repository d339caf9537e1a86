"""Activation checkpointing of layers, and offload of the inputs that it keeps."""
