"""
Fine-tune with transformers' own model and Trainer, to compare finetune.py with them.

Examples, batches and settings are those of finetune.py (results/study.md, last table). The initial
weights must be in Hugging Face layout. Needs transformers and accelerate.

$ python results/trainer.py configs/finetune_glue.py --task=RTE --epochs=3 \
    --init_from=sentence-transformers/all-MiniLM-L6-v2 --seeds=3

out/<name>_trainer.json gets each seed's seconds and its scores after the last epoch. In
finetune.py's eval_results.json these scores are called last_<metric>. After an interruption the
same command continues with the missing seeds.
"""
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
import finetune
from lib.common.device import choose_device, keep_freed_memory
from lib.common.errors import UserError, run_main
from lib.common.files import read_json, write_text
from lib.common.settings import load_settings
from lib.corpus.vocabulary import text_tokenizer
from lib.tasks.glue import find_task, task_name
from lib.tasks.predict import score_dev
from lib.tasks.task_data import TaskData, TrainingBatches
from lib.weights.checkpoint import find_weights, load_model


class Trainer(transformers.Trainer):
    """Train on a given list of batches."""

    def __init__(self, batches, *args):
        super().__init__(*args)
        self.batches = batches

    def get_train_dataloader(self):
        return self.batches


def rename(batches, steps):
    """finetune.py's batches under the names of transformers."""
    for step in range(steps):
        batch = {name: torch.from_numpy(array) for name, array in batches.get(step).items()}
        labels, mask = batch["labels"], batch.get("mask", torch.ones_like(batch["ids"]))
        targets = {"labels": labels} if labels.dim() == 1 else {
            "start_positions": labels[:, 0], "end_positions": labels[:, 1]}
        yield {"input_ids": batch["ids"], "token_type_ids": batch["token_types"],
               "attention_mask": mask.long(), **targets}


def train(model, batches, config, out):
    """Train transformers' model with finetune.py's settings. Returns the seconds."""
    steps = config.max_steps
    prepared = list(rename(batches, steps))
    settings = transformers.TrainingArguments(
        out, max_steps=steps, learning_rate=config.lr, warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay, max_grad_norm=config.grad_clip, adam_epsilon=1e-6,
        seed=config.seed, use_cpu=config.device == "cpu", bf16=config.dtype == "bfloat16",
        fp16=config.dtype == "float16", save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=100)
    trainer = Trainer(prepared, model, settings)
    begin = time.perf_counter()
    trainer.train()
    return time.perf_counter() - begin


def score(model, tokenizer_file, data, config, device, dtype):
    """Return the metrics of the dev splits, as finetune.py scores a model with these weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shutil.copy(tokenizer_file, folder)
        ours = load_model(folder).to(device)
        return score_dev(ours, data, config.batch_size, dtype)


def main(argv):
    config = load_settings(finetune.Config, argv)
    if config.accumulation != 1:
        raise UserError(f"accumulation = {config.accumulation}: expected 1")
    folder, vocab = find_weights(config.init_from)
    out = Path(config.out or f"out/{folder.name}_{task_name(config.task)}_trainer.json")
    device, dtype, line = choose_device(config.device, config.dtype)
    print(line)
    keep_freed_memory(device)
    config.device, config.dtype = str(device), str(dtype).removeprefix("torch.")  # resolved
    tokenizer = text_tokenizer(vocab)
    task = find_task(config.task)
    data = TaskData(task, tokenizer, config.max_len, config.doc_stride)
    steps_per_epoch = TrainingBatches(data.train, config).steps_per_epoch
    config.max_steps = config.max_steps or config.epochs * steps_per_epoch
    settings = {key: value for key, value in vars(config).items()
                if key not in ("seed", "seeds", "out")}
    saved = read_json(out) if out.exists() else {"settings": settings, "seeds": {}}
    if saved["settings"] != settings:
        raise UserError(f"{out} was made with other settings: give this run its own "
                        "--out=out/NAME.json")
    each = saved["seeds"]
    kind = transformers.BertForQuestionAnswering if task.reads_spans \
        else transformers.BertForSequenceClassification
    for seed in range(config.seed, config.seed + config.seeds):
        if str(seed) in each:
            continue
        config.seed = seed  # of the batches
        torch.manual_seed(seed)  # of the head
        more = {} if task.reads_spans else {"num_labels": max(1, len(task.labels))}
        model = kind.from_pretrained(folder, hidden_dropout_prob=config.dropout,
                                     attention_probs_dropout_prob=config.dropout, **more)
        batches = TrainingBatches(data.train, config)
        seconds = train(model, batches, config, f"out/{folder.name}_trainer")
        each[str(seed)] = {"seconds": seconds, **score(model, vocab, data, config, device, dtype)}
        print(f"seed {seed}: {each[str(seed)]}", flush=True)
        write_text(out, json.dumps(saved, indent=1))
    for name in each[str(config.seed)]:
        median = np.median([one[name] for one in each.values()])
        print(f"median of {len(each)}: {name} {median:.4f}")


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
