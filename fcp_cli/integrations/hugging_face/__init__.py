"""Make scripts on top of transformers' Trainer, TRL and accelerate follow a plan, unmodified."""
