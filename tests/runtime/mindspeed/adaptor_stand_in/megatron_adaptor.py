"""Stands in for MegatronAdaptor, which prepares NPUs for Megatron as it is imported; on the CPU `cpu` does that."""
