"""Plan and launch Flexible Context Parallelism."""

__version__ = "0.1.0"
