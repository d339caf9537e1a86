"""Hooks for unmodified Megatron training scripts under a plan; docs/how-to/megatron.md gives the reason of each.

`integrations.megatron_schedule` hooks the schedule, which runs a step's micro-batches, and substitutes the plan's
(`follow`), read from the script's own data set (`samples`). `model` makes attention and rotary embeddings of a GPTModel
follow the micro-batch of the call. `checks` rejects unsupported features, and `probe` compares attention numerically
before the first step.
"""
