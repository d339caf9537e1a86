"""One rank of a job whose trainers override methods of transformers' Trainer; see `trainer_worker`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Trainer

from tests.runtime.models import hugging_face
from tests.runtime.workers.trainer_worker import ITERATION, Cases, main, train


class Delegating(Trainer):
    """As frameworks do: a loss of its own under an option, which is off, and else the Trainer's."""

    is_own = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_own:
            return model(**inputs).loss * 0.0
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.enable_grad():
            return super().training_step(*args, **kwargs)

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_batch_samples(*args, **kwargs)


class Scaling(Trainer):
    """Half of the Trainer's loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss * 0.5


class Twice(Trainer):
    """The Trainer's loss, computed twice."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)
        return super().compute_loss(*args, **kwargs)


class TwoForwards(Trainer):
    """Two calls of the model, as of losses that compare them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class OtherTokens(Trainer):
    """A call of the model with tokens that are not the batch's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**{**inputs, "input_ids": inputs["input_ids"].clone()}).loss


class PerToken(Trainer):
    """Cross entropy to a power: a sum over tokens of a function of each."""

    power = 1.5

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        token_losses = _token_losses(outputs.logits, labels) ** self.power
        loss = token_losses.sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class PerTokenLogits(PerToken):
    """The model's mean loss, weighed by its tokens, with logits of the labelled tokens alone."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if inputs["labels"].shape[0] > 1:
            return inputs
        mask = (inputs["labels"] != -100)[0]
        inputs["labels"] = functional.pad(inputs["labels"][:, mask], (1, 0), value=-100)
        inputs["logits_to_keep"] = functional.pad(mask[1:], (0, 1), value=True)
        return inputs

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs).loss * ((inputs["labels"][:, 1:] != -100).sum() / num_items_in_batch)
        return loss * self.accelerator.num_processes


class WhileOthersMeet(PerToken):
    """Another thread's collective at the same time, as of the one that agrees on steps that are planned ahead."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.alone = groups[dist.get_rank()]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.all_reduce, torch.ones(1), group=self.alone).result()
        return super().compute_loss(*args, **kwargs)


class Averaging(Trainer):
    """A mean over the tokens of a micro-batch, whatever the global batch has."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        token_losses = _token_losses(model(**inputs).logits, labels)
        return token_losses.sum() / (labels != -100).sum()


class FirstTokens(Trainer):
    """Weights by the place in a row, of which a rank has a part."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        token_losses = _token_losses(model(**inputs).logits, labels)
        return (token_losses / (1 + torch.arange(token_losses.shape[1]))).sum() / num_items_in_batch


class ByRows(Trainer):
    """Weights by the rows of a batch, of which a ring has another number than one process."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        token_losses = _token_losses(model(**inputs).logits, labels)
        return token_losses.sum() * len(labels) / num_items_in_batch


class Meeting(Trainer):
    """A collective for every micro-batch, of which ranks have different numbers."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnStep(Trainer):
    """A step that reads its batch by itself."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = model(input_ids=inputs["input_ids"]).loss
        return loss


class ScaledStep(Trainer):
    """A step whose loss is logged twice as large."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs) * 2


class _Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self.data_source)))


class Backwards(Trainer):
    """The last row first, in every epoch."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return _Backwards(self.train_dataset)  # type: ignore[arg-type]


class _Repeated(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3]] * 6)


class Repeating(Trainer):
    """Some rows many times."""

    def get_train_dataloader(self) -> Any:
        sampler = _Repeated(SequentialSampler(self.train_dataset), 4, drop_last=False)  # type: ignore[arg-type]
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)  # type: ignore[arg-type]


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none", ignore_index=-100
    )


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = _token_losses(outputs.logits, labels)
    loss: Tensor = ((1 - torch.exp(-losses)) * losses).sum() / num_items_in_batch
    return loss


class WithFunction(Trainer):
    """The Trainer's own place for a loss function."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "compute_loss_func": focal})


def _train(kind: type[Trainer]) -> tuple[str, Callable[[Path], Any]]:
    return ITERATION, partial(train, kind=kind)


def _with_adapters(folder: Path) -> Any:
    """A loss of its own calls PEFT's model, which calls the `forward` within, past its hooks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return train(folder, kind=PerToken, model=get_peft_model(hugging_face("qwen3", torch.float32), adapter))


CASES: Cases = {
    **{kind.__name__: _train(kind) for kind in (Delegating, PerToken, PerTokenLogits, WhileOthersMeet, WithFunction)},
    "PerToken of adapters": (ITERATION, _with_adapters),
}
REFUSALS: Cases = {
    kind.__name__: _train(kind)
    for kind in (
        Scaling, Twice, TwoForwards, OtherTokens, Averaging, FirstTokens, ByRows, Meeting, OwnStep, ScaledStep, Backwards,
        Repeating,
    )
}  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], CASES, REFUSALS)
