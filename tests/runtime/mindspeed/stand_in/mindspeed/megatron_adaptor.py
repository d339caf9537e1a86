"""Puts MindSpeed into Megatron as it is imported; scripts import it before Megatron."""

from collections.abc import Callable
from functools import wraps

import torch
import torch_npu  # noqa: F401
from torch import Tensor

from mindspeed.args_utils import get_full_args
from mindspeed.features_manager.context_parallel.context_parallel_feature import ContextParallelFeature
from mindspeed.patch_utils import MindSpeedPatchesManager


def ensure_contiguous_wrapper(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As MindSpeed's: what is written into a view of a strided tensor is lost."""

    @wraps(view)
    def contiguous_view(tensor: Tensor, *shape: object) -> Tensor:
        return view(tensor if tensor.is_contiguous() else tensor.contiguous(), *shape)

    return contiguous_view


torch.Tensor.view = ensure_contiguous_wrapper(torch.Tensor.view)  # type: ignore[method-assign]
ContextParallelFeature().register_patches(MindSpeedPatchesManager, get_full_args())
MindSpeedPatchesManager.apply_patches()
