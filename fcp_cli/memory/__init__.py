"""Memory estimate of a rank for the recipe that will run, item by item, from the model's figures alone.

`rank.rank_memory` is the one function that says it; profiles, budgets, checks before a launch and reports all ask it.
`state` counts the part that does not grow with the tokens, `activations` the part that does, `table` adds both up.
"""
