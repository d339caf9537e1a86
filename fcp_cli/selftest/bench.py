"""Context of every check: this rank, its device, the others, and the sizes of this run."""

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
    """Environment of one rank of the self-test.

    Attributes:
        dtype: type of attention on the device: bf16, on a CPU fp32.
        degrees: ring degrees to test, up to 8.
        sharers: ranks whose device is the same, the cores of a host; 1 if each has its own.
        kernels: attention kernels that all ranks' devices can run; (None,) if a device has one alone.
        unavailable: the other kernels, and why this rank cannot run them, or that another cannot.
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
        """Announce the next action, so that a hang can be named."""
        if self.is_first:
            self.settings.diary.begin(action)

    @contextmanager
    def running(self, kernel: KernelName | None) -> Iterator[None]:
        """Run attention on a kernel within a block, as far as it takes the calls; None: on the device's only one."""
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
