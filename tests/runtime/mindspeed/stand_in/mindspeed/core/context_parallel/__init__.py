"""As in MindSpeed: where the others take Megatron's parallel state from."""

from megatron.core import parallel_state as mpu

__all__ = ["mpu"]
