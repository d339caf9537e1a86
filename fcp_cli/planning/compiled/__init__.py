"""The compiled planner: all kernels, whose sources together are the key under which they are kept on disk."""
