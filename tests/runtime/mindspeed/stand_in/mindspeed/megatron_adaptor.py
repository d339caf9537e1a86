"""Puts MindSpeed into Megatron as it is imported; scripts import it before Megatron."""

import torch_npu  # noqa: F401

from mindspeed.args_utils import get_full_args
from mindspeed.features_manager.context_parallel.context_parallel_feature import ContextParallelFeature
from mindspeed.patch_utils import MindSpeedPatchesManager

ContextParallelFeature().register_patches(MindSpeedPatchesManager, get_full_args())
MindSpeedPatchesManager.apply_patches()
