"""Reduce gradients over all ranks once per step, for plain modules, DDP, FSDP2 and DeepSpeed.

No reduction runs inside backwards of which ranks have different numbers: it would wait for ranks that wait for a hop
issued after it. Reducers that average over ranks, although the training objective is a sum, provide a factor to
multiply the loss with.

`choice.gradient_sync` selects the reducer of a model; `wrapping` finds the wrapper that reduces its gradients.
"""

from fcp_cli.runtime.gradients.base import GradientSync
from fcp_cli.runtime.gradients.choice import gradient_sync
from fcp_cli.runtime.gradients.replicas import PlainSync

__all__ = ["GradientSync", "PlainSync", "gradient_sync"]
