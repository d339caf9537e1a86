"""Hooks for unmodified Megatron scripts on MindSpeed under a plan; docs/how-to/mindspeed.md gives the reason of each.

Data, schedule and loss are those of `integrations.megatron`; `stack` has the differences. Attention stays MindSpeed's
ring: `placement` answers for Megatron and MindSpeed, call by call, who belongs to the ring, and `attention` binds a
ring to each call. `checks` refuses features that none of this supports.
"""
