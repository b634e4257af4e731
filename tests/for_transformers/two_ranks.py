"""
Train the same batches by Trainer and by accelerate, in as many processes as torchrun starts.

$ torchrun --nproc_per_node=2 -m tests.for_transformers.two_ranks FOLDER
Every rank writes its weights to FOLDER/<recipe>_<ranks>_<rank>.pt.
"""
import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

from for_transformers.add_memory import add_memory
from for_transformers.trainer import StepValues
from tests.for_transformers.small_models import MEMORY
from tests.for_transformers.test_adapter import base
from values import LazyAdam

BATCH, STEPS = 8, 4
EPS = 1e-3  # not so small that Adam makes updates of gradients that are rounding


def make():
    """Make a model in float64 without dropout, its values' optimizer and rows without padding.
    Without query_norm, whose statistics are of each rank's own batch."""
    model = base().double()
    torch.manual_seed(1)
    tables = add_memory(model, (1, 3), **MEMORY, query_norm=False)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 40, (BATCH * STEPS, 9))]
    return model, LazyAdam(tables.values(), lr=1e-2, eps=EPS), rows


def by_trainer(folder, ranks):
    model, values, rows = make()
    arguments = transformers.TrainingArguments(
        folder / "trainer", max_steps=STEPS, per_device_train_batch_size=BATCH // ranks,
        train_sampling_strategy="sequential", learning_rate=1e-3, adam_epsilon=EPS, save_steps=2,
        report_to="none", disable_tqdm=True, use_cpu=True,
        average_tokens_across_devices=False)  # else Trainer doubles this class's mean loss
    run = transformers.Trainer(model, arguments, train_dataset=rows,
                               callbacks=[StepValues(values)])
    run.train()
    return model


def by_accelerate(folder, ranks):
    model, values, rows = make()
    dense = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH // ranks)
    accelerator = Accelerator(cpu=True)
    model, dense, values, loader = accelerator.prepare(model, dense, values, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        for optimizer in (dense, values):
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder / f"state_{ranks}")
    return accelerator.unwrap_model(model)


def main(folder):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for recipe in (by_trainer, by_accelerate):
        model = recipe(folder, ranks)
        name = f"{recipe.__name__}_{ranks}_{os.environ.get('RANK', '0')}.pt"
        torch.save(model.state_dict(), folder / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
