"""From the options of a command to the settings of a plan: ranks, budget, recipe, pipelines."""
