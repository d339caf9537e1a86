"""The memory of a rank, from figures alone: what it holds for the recipe that will really run, item by item.

`rank.rank_memory` is the one function that says it; profiles, budgets, checks before a launch and reports all ask it.
`state` counts what does not grow with the tokens, `activations` what does, `table` adds both up.
"""
