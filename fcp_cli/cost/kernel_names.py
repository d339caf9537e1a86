"""Names of the attention kernels of NVIDIA devices; separate, so that command-line options import nothing heavy."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

KernelName: TypeAlias = Literal["cudnn", "fa2", "fa3", "fa4"]
KernelChoice: TypeAlias = Literal["auto", "cudnn", "fa2", "fa3", "fa4"]
KERNELS: Final[tuple[KernelName, ...]] = get_args(KernelName)
VARIABLE: Final = "FCP_ATTENTION_KERNEL"
"""Variable that carries a `KernelChoice` to a job's ranks."""
