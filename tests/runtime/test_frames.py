"""A causal encoder of videos whose frames lie on several ranks computes what one process does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.states.frames import with_frames_before
from fcp_cli.verification.emulation import Meeting, ThreadTransport, run_ranks

pytestmark = pytest.mark.torch

TIME = 2  # of [batch, channels, frames, height, width]
FRAMES = 16


class CausalEncoder(nn.Module):
    """Three convolutions that look back in time, of which the second keeps every other frame."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kernels = ((3, 1), (3, 2), (4, 1))
        self.layers = nn.ModuleList(nn.Conv3d(3, 3, (k, 3, 3), (s, 1, 1), (0, 1, 1)) for k, s in kernels).double()

    def forward(self, frames: Tensor, ring: Ring | None = None, sizes: Sequence[int] = ()) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Conv3d)
            reach, own = layer.kernel_size[0] - 1, frames.shape[TIME]
            if ring is not None:
                frames = with_frames_before(frames, reach, ring, sizes=sizes, dim=TIME)
                sizes = [size // layer.stride[0] for size in sizes]
            if not own:
                continue  # zeros stand for what is before the video, and nothing for what a rank has not
            frames = layer(functional.pad(frames, (0, 0, 0, 0, reach + own - frames.shape[TIME], 0))).tanh()
        return frames


@pytest.mark.parametrize("sizes", [(16,), (8, 8), (2, 4, 10), (6, 2, 2, 6), (4, 0, 10, 2)])
def test_a_causal_encoder_over_runs_of_frames_is_that_of_one_process(sizes: tuple[int, ...]) -> None:
    video = torch.randn(2, 3, FRAMES, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(2, 3, FRAMES // 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone, whole = CausalEncoder(), video.clone().requires_grad_()
    expected = alone(whole)
    torch.autograd.backward(expected, weights)
    encoders = [CausalEncoder() for _ in sizes]
    starts = list(accumulate(sizes, initial=0))

    def encode(meeting: Meeting, rank: int) -> tuple[Tensor, Tensor]:
        ring = Ring(
            shard_layout((8,), len(sizes)), rank, tuple(range(len(sizes))), ThreadTransport(meeting.mailbox, rank)
        )
        own = video[:, :, starts[rank] : starts[rank + 1]].clone().requires_grad_()
        latents = encoders[rank](own, ring, sizes)
        torch.autograd.backward(latents, weights[:, :, starts[rank] // 2 : starts[rank + 1] // 2])
        assert own.grad is not None
        return latents.detach(), own.grad

    found = run_ranks(len(sizes), encode)
    assert whole.grad is not None
    for parts, wanted in zip(zip(*found, strict=True), (expected.detach(), whole.grad), strict=True):
        assert float((torch.cat(parts, dim=TIME) - wanted).abs().max()) <= 1e-12
    for name, parameter in alone.named_parameters():
        shares = [dict(encoder.named_parameters())[name].grad for encoder in encoders]
        total = torch.stack([share for share in shares if share is not None]).sum(0)
        assert parameter.grad is not None and float((total - parameter.grad).abs().max()) <= 1e-12


def test_sizes_that_are_not_the_group_s_are_named() -> None:
    ring = Ring(shard_layout((8,), 1))
    for sizes in ((3, 4), (4,)):
        with pytest.raises(RunError, match=r"do not fit the sizes \[.*\] of the 1 ranks' runs; give one size for each"):
            with_frames_before(torch.zeros(3, 2), 1, ring, sizes=sizes)
