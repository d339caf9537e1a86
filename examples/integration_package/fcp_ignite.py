"""Engines of PyTorch-Ignite follow the plan: an iteration is a step, whose micro-batches each run the user's function.

A user's function calls `loss.backward()` and `optimizer.step()` itself. So each backward but the step's last leaves the
function by an exception, and the function goes on after the last one, with the gradients of the whole step.
"""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcp_cli import runtime as fcp
from fcp_cli.extend import RunError, prepare


class _NextMicroBatch(BaseException):
    """Leaves the training function after a backward that is not the step's last; not an error that it might catch."""


def hook(module: ModuleType) -> None:
    """Replace `Engine.run` of `ignite.engine.engine`."""
    own = module.Engine.run

    def run(
        engine: Any, data: Any = None, max_epochs: Any = None, max_iters: Any = None, epoch_length: Any = None
    ) -> Any:
        used = list(_used(engine._process_function))
        if not any(isinstance(one, Optimizer) for one in used):  # an evaluator
            with fcp.outside():
                return own(engine, data, max_epochs, max_iters, epoch_length)
        if (max_epochs or 1) != 1 or max_iters or epoch_length or engine.state.iteration:
            raise RunError("an Ignite engine follows a plan by run(loader) from its start; give epochs to 'fcp plan'")
        models = {id(one): one for one in used if isinstance(one, nn.Module) and list(one.parameters())}
        if len(models) != 1:
            raise RunError(f"an Ignite engine follows a plan with one model, but its function uses {len(models)}")
        (model,) = models.values()
        return _PlannedEngine(engine, model, data).run(partial(own, engine))

    module.Engine.run = run


def _used(function: Any) -> Iterator[Any]:
    """Yield the objects that a function refers to: its globals, closure, bound arguments and attributes of its self."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        yield from _used(function.func)
    elif inspect.ismethod(function):
        yield from vars(function.__self__).values()
        yield from _used(function.__func__)
    elif inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from (*found.nonlocals.values(), *found.globals.values())


class _PlannedEngine:
    """An engine whose loader's rows come by the plan; batches are a dictionary, or (inputs, labels)."""

    def __init__(self, engine: Any, model: nn.Module, loader: Any) -> None:
        prepare(model)  # attention on the ring of the micro-batch; before DDP and fully_shard
        self.engine, self.model, self.loader = engine, model, loader
        self.batch: Any = None
        self.session = fcp.start(fetch=self.fetch)
        self.session.metadata.manifest.require_rows(len(loader.dataset))
        planned = self.session.metadata.global_batch_size
        if loader.batch_size != planned:
            raise RunError(
                f"the loader's batch_size is {loader.batch_size}, but the plan's batches have {planned} rows"
            )
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.after_forward)

    def fetch(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels of a row of the data, as the loader's own function collates it."""
        found = self.loader.collate_fn([self.loader.dataset[row]])
        self.is_pair = isinstance(found, tuple | list)
        inputs, labels = found if self.is_pair else (found, found["labels"])
        if unknown := set(inputs) - {"input_ids", "attention_mask", "labels"}:
            raise RunError(f"batches have {', '.join(sorted(unknown))}, which an Ignite engine cannot take from a plan")
        kept = inputs["attention_mask"][0].bool() if "attention_mask" in inputs else slice(None)
        return inputs["input_ids"][0][kept], labels[0][kept]

    def collated(self) -> Any:
        """Return the micro-batch in the form of the loader's batches."""
        batch = {"input_ids": self.batch.input_ids, "labels": self.batch.labels}
        return (batch, self.batch.labels) if self.is_pair else batch

    def before_forward(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if fcp.current_ring.get() is None:  # an evaluation during the run
            return None
        kwargs.pop("attention_mask", None)
        if kwargs.get("labels") is None:
            raise RunError("let the model compute its loss: the function has to pass it the batch's labels")
        return args, kwargs | {"position_ids": self.batch.position_ids, "labels": self.batch.labels}

    def after_forward(self, _: nn.Module, args: Any, output: Any) -> Any:
        if fcp.current_ring.get() is not None:
            output.loss = self.batch.normalised(output.loss)
        return output

    def run(self, own: Any) -> Any:
        """Run the engine over the steps of the plan; `own` is its unmodified `run`."""
        function, backward, zero_grad = self.engine._process_function, Tensor.backward, Optimizer.zero_grad

        def run_step(engine: Any, step: Any) -> Any:
            self.microbatches, self.keeps_gradients = iter(step), False
            output = None
            for batch in self.microbatches:
                self.batch = batch
                with suppress(_NextMicroBatch):
                    output = function(engine, self.collated())
            loss = step.reduced_loss()
            return torch.full_like(output, loss) if isinstance(output, Tensor) else loss

        def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]
            self.keeps_gradients = not self.batch.is_last
            if self.keeps_gradients:
                raise _NextMicroBatch
            next(self.microbatches, None)  # the end of the iteration sums the gradients over ranks

        def clear(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self.keeps_gradients:
                zero_grad(optimizer, *args, **kwargs)

        def replace(*functions: Any) -> None:
            Tensor.backward, Optimizer.zero_grad, self.engine._process_function = functions  # type: ignore[method-assign]

        replace(run_backward, clear, run_step)
        try:
            steps = self.session.steps(self.model)
            state = own(steps, max_epochs=1, epoch_length=self.session.metadata.steps)
            next(steps, None)  # closes the last step
            return state
        finally:
            replace(backward, zero_grad, function)
            self.session.close()
