"""Plans of whole datasets: planning runs and their journals, comparisons, verdicts, refits, and jobs without a plan."""
