"""Activation checkpointing of layers, and offload of their saved inputs."""
