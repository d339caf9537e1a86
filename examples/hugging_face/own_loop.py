"""Train the model of train.py in a loop of its own: a sampler says which rows a rank needs, a DataLoader reads them.

FCP_PLAN=plan.parquet torchrun --nproc-per-node 2 own_loop.py
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from train import collate, rows, small_model

from fcp_cli import runtime as fcp
from fcp_cli.integrations.transformers import prepare


def main() -> None:
    model = small_model()
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    with fcp.start() as session:
        sampler = fcp.PlanSampler(session)
        loader = DataLoader(rows(), sampler=sampler, collate_fn=collate, num_workers=1)
        session.fetch = sampler.fetch_from(loader)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=session.metadata.steps)
        for step in session.steps(model):
            for batch in step:
                logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
                batch.loss(logits).backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loss = step.reduced_loss()
            if session.rank == 0:
                print(f"step {step.index}: loss {loss:.6f}, gradient norm {float(norm):.6f}", flush=True)


if __name__ == "__main__":
    main()
