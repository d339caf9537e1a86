"""Train a small decoder with PyTorch-Ignite; nothing in it knows of plans. Arguments: kind of loop, rows in a batch."""

import os
import sys
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

KIND, BATCH_SIZE = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
drawn = torch.Generator().manual_seed(7)
DATA: Any = [torch.randint(64, (length,), generator=drawn) for length in (40, 3, 7, 25, 12, 5, 33, 9, 17, 4, 28, 6)]
sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=8, **sizes)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses: list[float] = []


def collate(rows: list[Tensor]) -> Any:
    """Pad the rows to the longest, as (inputs, labels) for Ignite's own trainer and else as one dictionary."""
    longest = max(map(len, rows))

    def padded(row: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(row, (0, longest - len(row)), value=value)

    batch = {
        "input_ids": torch.stack([padded(row, 0) for row in rows]),
        "attention_mask": torch.stack([padded(torch.ones_like(row), 0) for row in rows]),
        "labels": torch.stack([padded(row, -100) for row in rows]),
    }
    return (batch, batch["labels"]) if KIND == "supervised" else batch


def train_step(_: Engine, batch: dict[str, Tensor]) -> float:
    """Clear, compute, clip and step, as users write it."""
    if KIND != "clears after":
        optimizer.zero_grad()
    loss = model(batch["input_ids"]).logits.mean() if KIND == "own loss" else model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if KIND == "clears after":
        optimizer.zero_grad()
    return float(loss.detach())


if KIND == "supervised":
    trainer = create_supervised_trainer(
        model,
        optimizer,
        lambda loss, _: loss,
        model_fn=lambda model, batch: model(**batch),
        model_transform=lambda output: output.loss,
    )
else:
    trainer = Engine(train_step)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.state.output)))
trainer.run(
    DataLoader(DATA + DATA[:1] if KIND == "more data" else DATA, batch_size=BATCH_SIZE, collate_fn=collate),
    max_epochs=1,
)
torch.save({"losses": losses, "weights": model.state_dict()}, f"trained.{os.environ.get('RANK', 'alone')}")
