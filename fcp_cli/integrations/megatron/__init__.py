"""Hooks for unmodified Megatron training scripts under a plan; docs/how-to/megatron.md gives the reason of each.

`integrations.megatron_schedule` hooks the call that runs a step's micro-batches, and hands it those of the plan
(`follow`), with data that it reads from the script's own data set (`samples`). `model` makes attention and rotary
embeddings of a GPTModel follow the micro-batch of the call. `checks` refuses features that none of this supports, and
`probe` compares numbers before the first step.
"""
