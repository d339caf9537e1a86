"""Launch targets (schedulers and platforms): renders a job to files with templates, which sites may replace."""
