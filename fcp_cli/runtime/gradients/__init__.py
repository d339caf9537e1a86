"""Sum gradients over all ranks once per step, whatever holds the parameters: nothing, DDP, FSDP2 or DeepSpeed.

No reduction runs inside a backward of which ranks have different numbers: it would wait for ranks that wait for a hop
behind it. What averages over ranks, where the training objective asks for a sum, names a factor that the loss is
multiplied with.

`choice.gradient_sync` finds the way that a model needs; `wrapping` finds what reduces the gradients of a model.
"""

from fcp_cli.runtime.gradients.base import GradientSync
from fcp_cli.runtime.gradients.choice import gradient_sync
from fcp_cli.runtime.gradients.replicas import PlainSync

__all__ = ["GradientSync", "PlainSync", "gradient_sync"]
