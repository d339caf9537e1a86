"""Plans and comparisons of whole datasets: step by step, kept, estimated, for a followed job."""
