"""From a plan to a running job: what to start (`spec`), how (`torchrun`), after which checks (`preflight`)."""
