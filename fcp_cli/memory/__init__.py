"""Memory estimate of a rank under a recipe, item by item, from the model's figures alone.

`rank.rank_memory` is the single entry point for profiles, token budgets, launch checks and reports. `state` counts the
part independent of tokens, `activations` the part that grows with them.
"""
