"""The most memory that this process has had."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has had allocated on its device, or on a host all that it has had."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most: int = torch.get_device_module(device).max_memory_allocated(device)
    return most
