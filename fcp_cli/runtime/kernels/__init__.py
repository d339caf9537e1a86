"""Attention kernels behind one interface. We write none: every one calls a kernel that the device's PyTorch ships."""

from fcp_cli.runtime.kernels.base import AttentionKernel, lse_dtype
from fcp_cli.runtime.kernels.select import capped_kernel, prefer, preferring, select_kernel

__all__ = ["AttentionKernel", "capped_kernel", "lse_dtype", "prefer", "preferring", "select_kernel"]
