"""Planning during a training whose sequences are known only when they arrive."""
