"""Hooks for unmodified Megatron scripts on MindSpeed under a plan; docs/how-to/mindspeed.md gives the reason of each.

Data, schedule and loss are those of `integrations.megatron`; `stack` has the differences. MindSpeed's ring attention is
used if possible: `placement` overrides the context-parallel group per call, and `attention` binds a ring to each call.
`checks` rejects unsupported features.
"""
