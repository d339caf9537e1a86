"""A mixin that makes a `transformers.Trainer` subclass follow a plan explicitly.

    class PlannedTrainer(fcp_cli.runtime.FollowsPlan, Trainer): ...

Under `fcp launch` it is not needed: there `Trainer` itself is hooked in the same three methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from fcp_cli.integrations.hugging_face.follow import TrainerFollower

_FOLLOWER = "_fcp_follower"


class FollowsPlan:
    """Mixin to put before `transformers.Trainer`, or a subclass such as TRL's `SFTTrainer`, in a class's bases.

    Attributes:
        plan: plan file; defaults to FCP_PLAN.
    """

    plan: Path | str | None = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with following(self, self.plan):
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return a loader with as many batches as the plan's epoch; the steps themselves fetch the rows."""
        return planned_loader(self, super().get_train_dataloader)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run all micro-batches of the plan's next step."""
        return planned_step(self, super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]


@contextmanager
def following(trainer: Any, plan: Path | str | None = None) -> Iterator[None]:
    """Make a trainer follow a plan inside this context; a no-op if it already does.

    Raises:
        FcpError: the plan, the data or the script's settings are not supported.
    """
    if _FOLLOWER in vars(trainer):
        yield
        return
    from fcp_cli.integrations.hugging_face.follow import TrainerFollower  # transformers is slow to import

    follower = TrainerFollower(trainer, None if plan is None else Path(plan))
    setattr(trainer, _FOLLOWER, follower)
    try:
        yield
        follower.leave()  # first, since `end` may exit with a signal's status, on which torchrun stops the other ranks
        follower.stop.end()
    finally:
        delattr(trainer, _FOLLOWER)
        follower.close()


def planned_loader(trainer: Any, get_loader: Callable[[], Any]) -> Any:
    """Return a trainer's training loader: the plan's if it follows one, else its own."""
    follower: TrainerFollower | None = vars(trainer).get(_FOLLOWER)
    return get_loader() if follower is None else follower.loader()


def planned_step(trainer: Any, step: Callable[..., Tensor], model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
    """Run a trainer's step: the plan's if it follows one, else its own."""
    follower: TrainerFollower | None = vars(trainer).get(_FOLLOWER)
    return step(model, inputs, num_items_in_batch) if follower is None else follower.run(model, inputs)
