"""One rank of a job that trains by `transformers.Trainer` in many ways; each leaves `CASE-RANK.pickle` in a folder.

Run by torchrun as `-m tests.runtime.workers.trainer_worker FOLDER CASE...`. First all cases run as the unmodified
scripts that they are, then once more with fcp's hooks, under the folder's plans.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from fcp_cli.errors import FcpError
from fcp_cli.integrations.hugging_face.hooks import hook_trainer
from fcp_cli.util import processes
from tests.patience import PATIENCE_SECONDS
from tests.runtime.families import FAMILIES
from tests.runtime.models import VOCAB_SIZE, hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH, LENGTHS, LONG
from tests.runtime.workers.leave import leave_job

UNPLANNED = ("unplanned.parquet", "made.parquet", "other.parquet", "workers.parquet")  # which the trainers have made
ITERATION, WAVES, MASKED = "iteration.parquet", "waves.parquet", "masked.parquet"


def rows(lengths: tuple[int, ...] = LENGTHS) -> Dataset:
    """A prompt that is not learned, and an answer that is."""
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(1, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]}
    )


def collate(items: list[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad as any script does."""
    longest = max(len(item["input_ids"]) for item in items)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([[*item[name], *[value] * (longest - len(item[name]))] for item in items])

    mask = torch.tensor([[1] * len(item["input_ids"]) + [0] * (longest - len(item["input_ids"])) for item in items])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def collate_prompts(items: list[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Let what is not learned see itself both ways, as a prefix language model does; padding sees itself alone."""
    batch = collate(items)
    rows, longest = batch["input_ids"].shape
    seen = torch.ones(longest, longest, dtype=torch.bool).tril().repeat(rows, 1, 1)
    for row, item in enumerate(items):
        prompt, length = len(item["input_ids"]) // 3, len(item["input_ids"])
        seen[row, :prompt, :prompt] = True
        seen[row, length:] = torch.eye(longest, dtype=torch.bool)[length:]
    return {**batch, "attention_mask": seen[:, None]}


def common_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """What every case gives its trainer."""
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 1,
    }
    return {**given, **changes}


def collate_cut(items: list[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Cut rows to 16 tokens, so that the stored lengths are not those that are trained."""
    return collate([{name: values[:16] for name, values in item.items()} for item in items])


def other_rows_on_rank_1(folder: Path) -> dict[str, Any]:
    own = dist.get_rank() == 1
    return train(folder, lengths=(*LENGTHS[:20], LENGTHS[20] + own, *LENGTHS[21:]))


def outcome(trainer: Any, model: Any = None) -> dict[str, Any]:
    state = (model or trainer.accelerator.unwrap_model(trainer.model)).state_dict()
    return {
        "is_sharded": any(hasattr(value, "full_tensor") for value in state.values()),
        "log": trainer.state.log_history,
        "weights": {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()
        },
    }


def train(folder: Path, *, resume: bool | str | None = None, **settings: Any) -> dict[str, Any]:
    """Train with the settings of `trainer_of`."""
    trainer = trainer_of(folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def trainer_of(
    folder: Path,
    *,
    model: Any = None,
    evaluates: bool = False,
    kind: type[Trainer] = Trainer,
    lengths: tuple[int, ...] = LENGTHS,
    data: Any = None,
    collator: Callable[..., dict[str, torch.Tensor]] = collate,
    callbacks: list[TrainerCallback] | None = None,
    **changes: Any,
) -> Trainer:
    return kind(
        model=model or hugging_face("qwen3", torch.float32),
        args=TrainingArguments(**common_arguments(folder, **changes)),
        train_dataset=rows(lengths) if data is None else data,
        eval_dataset=rows(LENGTHS[:5]) if evaluates else None,
        data_collator=collator,
        callbacks=callbacks,
    )


def lora(folder: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return train(folder, model=get_peft_model(hugging_face("qwen3", torch.float32), adapter))


def resumed(folder: Path, **changes: Any) -> dict[str, Any]:
    """Stop after two of three steps, and go on from the checkpoint with another model and trainer."""
    settings: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **changes,
    }
    train(folder, evaluates=True, **settings)
    return train(folder, evaluates=True, resume=str(folder / "out" / "checkpoint-2"), **settings)


def split(folder: Path, **config: bool) -> dict[str, Any]:
    """Share each batch of the script among the ranks, which accelerate can do in two ways."""
    return train(folder, per_device_train_batch_size=GLOBAL_BATCH, accelerator_config={"split_batches": True, **config})


def classify(folder: Path) -> dict[str, Any]:
    kind: Any = transformers.Qwen3ForSequenceClassification
    return train(folder, model=kind(hugging_face("qwen3", torch.float32).config))


def two_trainers(folder: Path) -> dict[str, Any]:
    """Create a trainer of other data before another one trains."""
    later = trainer_of(folder, lengths=LENGTHS[:20])
    found = train(folder)
    later.train()
    return found


class Asked(TrainerCallback):
    """A signal that reaches rank 1 alone, in the second step."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), self._number)


class InOrder(Trainer):
    """Visits the rows in the data's order by a sampler of its own."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return list(range(len(self.train_dataset)))  # type: ignore[arg-type]


class Growing(torch.utils.data.Dataset[Any]):
    """Rows of which the last has a token more from the second epoch on."""

    def __init__(self, own: Dataset) -> None:
        self._rows, self._epoch = own, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        found = self._rows[row]
        if not self._epoch or row < len(self) - 1:
            return found
        return {name: [*values[:1], *values] for name, values in found.items()}


class Grow(TrainerCallback):
    """Tells the data set which epoch begins, as curricula are told."""

    def __init__(self, data: Growing) -> None:
        self._data = data

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._data.set_epoch(int(state.epoch or 0))


def growing(folder: Path) -> dict[str, Any]:
    """With workers, which keep the rows of the first epoch."""
    data = Growing(rows())
    return train(folder, data=data, callbacks=[Grow(data)], num_train_epochs=2, dataloader_num_workers=1)


def stopped(folder: Path, number: int) -> dict[str, Any]:
    """Under a plan: stop in the second step, and start the unmodified script again."""
    os.environ["FCP_RUN_DIR"] = str(folder)
    if folder.parent.name == "planned":
        try:
            train(folder, callbacks=[Asked(number)])
            raise AssertionError("it trained on")
        except SystemExit as ended:
            assert ended.code == 128 + signal.SIGINT
        assert (folder / "out" / "checkpoint-2" / "trainer_state.json").is_file()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found = train(folder)
    dist.barrier()
    assert not (folder / "stopped.json").exists()
    return found


def sharded(folder: Path, *, reshards: bool, run: Callable[..., dict[str, Any]] = train) -> dict[str, Any]:
    """accelerate leaves `fsdp=` out without accelerators: let it think of CPU ranks as of any others, in both runs."""
    kind: Any = AcceleratorState
    own = kind.__init__

    def let_it_shard(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        own(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin
            if state.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state.mixed_precision)

    kind.__init__ = let_it_shard
    try:
        found = run(folder, fsdp=True, fsdp_config={"reshard_after_forward": reshards})
    finally:
        kind.__init__ = own
    assert found["is_sharded"]
    return found


def of_family(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Train a tiny decoder of one of transformers' families, in fp32."""
    family = FAMILIES[name]
    model = replace(family, settings={**family.settings, **settings}).build().float().train()
    return train(folder, model=model)


FAMILIES_TRAINED = (
    *("llama", "gemma2", "gpt_oss", "glm4", "olmo2", "mixtral", "deepseek_v3, dense", "cohere2", "phi3", "smollm3"),
)
Cases = Mapping[str, tuple[str, Callable[[Path], Any]]]
"""Name -> plan, and what to run in a folder."""
CASES: Cases = {
    "ddp": (ITERATION, train),
    "ddp waves": (WAVES, train),
    "accumulation": (
        ITERATION,
        lambda folder: train(
            folder,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=GLOBAL_BATCH // 4,
            dataloader_num_workers=1,
        ),
    ),
    "resumed, evaluated": (ITERATION, resumed),
    "stopped": (ITERATION, partial(stopped, number=processes.STOP)),
    "stopped by SIGINT": (ITERATION, partial(stopped, number=signal.SIGINT)),
    "lora": (ITERATION, lora),
    "masked": (MASKED, lambda folder: train(folder, collator=collate_prompts)),
    "recomputed": (WAVES, lambda folder: train(folder, gradient_checkpointing=True)),
    "recomputed as needed": ("as-needed.parquet", train),
    "lora, recomputed as needed": ("as-needed.parquet", lora),
    "smoothed": (ITERATION, lambda folder: train(folder, label_smoothing_factor=0.1)),
    "bf16": (ITERATION, lambda folder: train(folder, bf16=True)),
    "max_steps": (ITERATION, lambda folder: train(folder, max_steps=2)),
    "unplanned": (UNPLANNED[0], train),
    "repeated": (UNPLANNED[0], train),
    "unplanned, in an order of its own": ("unplanned-ordered.parquet", lambda folder: train(folder, kind=InOrder)),
    "counted": (
        "unplanned-counted.parquet",
        lambda folder: train(
            folder,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=GLOBAL_BATCH // 4,
            include_num_input_tokens_seen="non_padding",
        ),
    ),
    "unplanned, read by workers": (UNPLANNED[3], lambda folder: train(folder, dataloader_num_workers=1)),
    "unplanned, cut by the collator": (UNPLANNED[1], lambda folder: train(folder, collator=collate_cut)),
    "split batches": ("unplanned-split.parquet", partial(split, dispatch_batches=False)),
    "split and dispatched batches": ("unplanned-dispatched.parquet", partial(split, dispatch_batches=True)),
    "fsdp": (WAVES, partial(sharded, reshards=True)),
    "fsdp, resumed": (
        WAVES,
        partial(sharded, reshards=True, run=partial(resumed, optim="adamw_torch", learning_rate=1e-3)),
    ),
    "fsdp that keeps weights": (ITERATION, partial(sharded, reshards=False)),
    "fsdp, bf16, for 12 steps": (
        "long.parquet",
        partial(sharded, reshards=True, run=partial(train, bf16=True, lengths=LONG * LENGTHS)),
    ),
    "aot_eager": (ITERATION, lambda folder: train(folder, torch_compile=True, torch_compile_backend="aot_eager")),
    "tied embeddings": (ITERATION, partial(of_family, name="llama", tie_word_embeddings=True)),
    **{f"family {name}": (ITERATION, partial(of_family, name=name)) for name in FAMILIES_TRAINED},
}
REFUSALS: Cases = {
    "fsdp that gathers weights again": (ITERATION, partial(sharded, reshards=True)),
    "other batch": (ITERATION, lambda folder: train(folder, per_device_train_batch_size=2)),
    "more epochs": (ITERATION, lambda folder: train(folder, num_train_epochs=2)),
    "fewer rows": (ITERATION, lambda folder: train(folder, lengths=LENGTHS[:20])),
    "longer row": (ITERATION, lambda folder: train(folder, lengths=(*LENGTHS[:20], LENGTHS[20] + 1, *LENGTHS[21:]))),
    "other data on rank 1": (UNPLANNED[2], other_rows_on_rank_1),
    "second trainer": (UNPLANNED[0], lambda folder: train(folder, lengths=LENGTHS[:20])),
    "second trainer, made before": ("unplanned-two.parquet", two_trainers),
    "sequence classification": ("unplanned-class.parquet", classify),
    "changing rows": ("unplanned-growing.parquet", growing),
    "grouped": (ITERATION, lambda folder: train(folder, train_sampling_strategy="group_by_length")),
}


def hook() -> None:
    hook_trainer(transformers.trainer)


def script_of(run: Callable[[Path], Any]) -> Hashable:
    """What two cases share that run the same script, under whatever plans."""
    return (run.func, run.args, repr(run.keywords)) if isinstance(run, partial) else run


def main(folder: Path, wanted: list[str], cases: Cases, refusals: Cases, hook: Callable[[], None] = hook) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plain: dict[Hashable, Any] = {}  # unmodified, cases of one script are the same run
    for phase in ("plain", "planned"):
        if phase == "planned":
            hook()
        known = cases if phase == "plain" else {**cases, **refusals}
        for name in wanted or known:
            if name not in known:
                continue
            plan, run = known[name]
            os.environ["FCP_PLAN"] = str(folder / plan)
            os.environ.pop("FCP_PLANNING", None)
            if plan in UNPLANNED or plan.startswith("unplanned-"):
                os.environ["FCP_PLANNING"] = str(folder / "planning.json")
            own = folder / phase / name
            own.mkdir(parents=True, exist_ok=True)
            if phase == "planned":
                os.environ["FCP_METRICS"] = str(own / "metrics.jsonl")
            try:
                result = plain[script_of(run)] if phase == "plain" and script_of(run) in plain else run(own)
            except FcpError as error:
                result = str(error)
            if phase == "plain":
                plain[script_of(run)] = result
            (own / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(result))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], CASES, REFUSALS)
