"""Sum gradients over all ranks once per step, for plain modules, DDP, FSDP2 and DeepSpeed.

No reduction runs inside a backward of which ranks have different numbers: it would wait for ranks that wait for a hop
behind it. A reducer that averages over ranks, although the training objective is a sum, names a factor that the loss is
multiplied with.

`choice.gradient_sync` finds the reducer of a model; `wrapping` finds the wrapper around a model.
"""

from fcp_cli.runtime.gradients.base import GradientSync
from fcp_cli.runtime.gradients.choice import gradient_sync
from fcp_cli.runtime.gradients.replicas import PlainSync

__all__ = ["GradientSync", "PlainSync", "gradient_sync"]
