"""Hooks for unmodified scripts on transformers' Trainer, TRL and accelerate, so that they follow a plan."""
