"""Context of the checks: this rank, its device, the other ranks, and test sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fcp_cli.cost.kernel_names import KERNELS, KernelName
from fcp_cli.profiling.workers.device import Stopwatch, ranks_on_this_host
from fcp_cli.profiling.workers.links import gathered
from fcp_cli.runtime.communication.transport import ProcessTransport
from fcp_cli.runtime.communication.world import ProcessWorld
from fcp_cli.runtime.kernels import preferring
from fcp_cli.runtime.kernels.cuda_choice import Preference
from fcp_cli.runtime.kernels.probe import GENERIC, unusable
from fcp_cli.selftest.settings import Settings


class Bench:
    """Context of a rank in the self-test.

    Attributes:
        dtype: attention dtype: bf16 on accelerators, fp32 on a CPU.
        degrees: ring degrees to test, at most 8.
        sharers: number of ranks that share a CPU host; 1 if each rank has its own device.
        kernels: attention kernels available on all ranks; (None,) if the device has a single one.
        unavailable: why this or another rank cannot run a kernel, by kernel.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.world = ProcessWorld()
        self.ranks_per_node = ranks_on_this_host()
        self.sharers = self.ranks_per_node if device.type == "cpu" else 1
        self.transport = ProcessTransport.create(device)
        self.stopwatch = Stopwatch(device)
        self.degrees = range(2, min(8, self.world.size) + 1)
        self.kernels: tuple[KernelName | None, ...] = (None,)
        self.unavailable: dict[KernelName, str] = {}
        if device.type == "cuda":
            self._find_kernels()

    gather = staticmethod(gathered)

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def begin(self, action: str) -> None:
        """Record the next action, so that a hang can be located."""
        if self.is_first:
            self.settings.diary.begin(action)

    @contextmanager
    def running(self, kernel: KernelName | None) -> Iterator[None]:
        """Prefer an attention kernel within the block; None: the device's only one."""
        if kernel is None:
            yield
            return
        with preferring(Preference(asked=kernel)):
            yield

    def _find_kernels(self) -> None:
        reasons = {name: unusable(name, GENERIC, self.device) for name in KERNELS}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
        everywhere = self.gather([float(name not in self.unavailable) for name in KERNELS])
        self.kernels = tuple(name for i, name in enumerate(KERNELS) if all(row[i] for row in everywhere))
        for name in KERNELS:
            if name not in self.kernels:
                self.unavailable.setdefault(name, "another rank cannot run it")
