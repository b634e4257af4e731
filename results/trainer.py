"""
finetune.py's peer in results/study.md: the same examples, batches and settings, in the hands of
transformers' own model and Trainer. It takes finetune.py's settings, weights in Hugging Face
layout, and needs transformers and accelerate.

$ PYTHONPATH=. python results/trainer.py configs/finetune_glue.py --task=RTE --epochs=3 \
    --init_from=sentence-transformers/all-MiniLM-L6-v2 --seeds=3

Scores and seconds go to out/<name>_trainer.json: those after the last epoch, as in finetune.py's
eval_results.json under last_.
"""
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import common  # before torch: how its threads wait

# isort: split
import numpy as np
import torch
import transformers

import checkpoint
import finetune
import tasks
from data import load_tokenizer


class Trainer(transformers.Trainer):
    """It trains on batches that were made before."""

    def __init__(self, batches, *args):
        super().__init__(*args)
        self.batches = batches

    def get_train_dataloader(self):
        return self.batches


def batches(data, steps):
    """finetune.py's batches under the names of transformers."""
    for step in range(steps):
        batch = {name: torch.from_numpy(array) for name, array in data.get(step).items()}
        labels, mask = batch["labels"], batch.get("mask", torch.ones_like(batch["ids"]))
        targets = {"labels": labels} if not data.is_squad else {
            "start_positions": labels[:, 0], "end_positions": labels[:, 1]}
        yield {"input_ids": batch["ids"], "token_type_ids": batch["token_types"],
               "attention_mask": mask.long(), **targets}


def score(model, tokenizer_file, data, device):
    """The metrics of the dev splits, as finetune.py scores its own model: one with these weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shutil.copy(tokenizer_file, folder)
        ours = checkpoint.load_model(folder)
        return finetune.evaluate(SimpleNamespace(
            model=ours.to(device), batches=data, device=device, dtype=torch.float32))[0]


def main(argv):
    config = common.load(finetune.Config, argv)
    folder, vocab = checkpoint.find_weights(config.init_from)
    out = Path(config.out or f"out/{folder.name}_{tasks.name_of(config.task)}_trainer.json")
    if out.exists():
        print(f"{out} is done: --out=out/NAME.json starts anew")
        return
    device, _ = common.setup(config.device, "float32", config.seed)
    common.keep_freed_memory(device)
    config.device = str(device)
    tokenizer = load_tokenizer(vocab)
    tokenizer.encode_special_tokens = True
    task = tasks.find(config.task)
    data = finetune.Data(task, tokenizer, config)
    steps, each = config.max_steps or config.epochs * data.steps_per_epoch, []
    kind = transformers.BertForQuestionAnswering if data.is_squad \
        else transformers.BertForSequenceClassification
    for seed in range(config.seed, config.seed + config.seeds):
        config.seed = seed  # of the batches
        torch.manual_seed(seed)  # of the head
        more = {} if data.is_squad else {"num_labels": max(1, len(task.labels))}
        model = kind.from_pretrained(folder, hidden_dropout_prob=config.dropout,
                                     attention_probs_dropout_prob=config.dropout, **more)
        prepared = list(batches(data, steps))
        settings = transformers.TrainingArguments(
            f"out/{folder.name}_trainer", max_steps=steps, learning_rate=config.lr,
            warmup_steps=round(config.warmup * steps), weight_decay=config.weight_decay,
            max_grad_norm=config.grad_clip, adam_epsilon=1e-6, seed=seed,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=100,
            use_cpu=device.type == "cpu")
        trainer = Trainer(prepared, model, settings)
        begin = time.perf_counter()
        trainer.train()
        each.append({"seed": seed, "seconds": time.perf_counter() - begin,
                     **score(model, vocab, data, device)})
        print(each[-1], flush=True)
    names = [name for name in each[0] if name != "seed"]
    print({name: round(float(np.median([one[name] for one in each])), 4) for name in names})
    common.write_text(out, json.dumps(each, indent=1))


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
