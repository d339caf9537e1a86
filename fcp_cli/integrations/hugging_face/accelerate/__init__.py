"""Scripts whose own loop accelerate prepares."""
