"""Resolution of command options to the settings of a plan: ranks, token budget, recipe, pipelines."""
