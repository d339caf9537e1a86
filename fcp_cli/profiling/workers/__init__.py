"""The ranks that measure: kernels, links, micro-batches, the optimizer's update and memory."""
