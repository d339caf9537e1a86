"""Scripts whose own loop trains an engine of DeepSpeed."""
