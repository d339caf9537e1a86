"""Attention kernels behind one interface. All call kernels of PyTorch or of other packages; fcp has none."""

from fcp_cli.runtime.kernels.base import AttentionKernel, lse_dtype
from fcp_cli.runtime.kernels.select import capped_kernel, prefer, preferring, select_kernel

__all__ = ["AttentionKernel", "capped_kernel", "lse_dtype", "prefer", "preferring", "select_kernel"]
