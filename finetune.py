"""
Fine-tune a pretrained model on GLUE, SQuAD 1.1 or a task of your own.

$ python finetune.py configs/demo_finetune.py         # after configs/demo.py; minutes, no network
$ python finetune.py configs/finetune_glue.py --task=SST-2 --init_from=out/base_resm_init --seeds=5
$ python finetune.py configs/finetune_squad.py --init_from=out/base_resm_init
$ torchrun --standalone --nproc_per_node=4 finetune.py CONFIG --accumulation=4
$ python finetune.py CONFIG --out=out/NAME --seed=1   # beside a process with --seed=0

A task of your own is a folder: --task=FOLDER. Its train.tsv and dev.tsv begin with a header. Texts
are in the column `sentence`, or in `sentence1` and `sentence2`. The target is `label` (a class) or
`score` (a number). --key=value overrides a setting below. The same command goes on where a stopped
run left off.

out/<run>/seed0/                 config.json, log.jsonl and vocab.txt as in a run of pretrain.py;
                                 the newest step_000500/ until the seed is done, then only best/
out/<run>/seed0/eval_results.json, predictions_dev.tsv: of the weights in best/
out/<run>/eval_results.json      the medians over the finished seeds, and the scores of each
"""
import json
import math
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lib import ranks, training
from lib.corpus import ORDER
from lib.device import autocast, to_device, use_device, wants_compile
from lib.files import discard, file_sha256, lock, write_text
from lib.run import CHECKPOINT, Run, numbered
from lib.settings import UserError, load_settings
from lib.squad import best_answers
from lib.tasks import (
    find_task,
    load_examples,
    pad,
    predict_examples,
    prediction_table,
    score_dev,
    tsv_text,
)
from lib.tokenizer import text_tokenizer
from lib.weights import (
    check_objective,
    find_weights,
    init_from,
    model_file,
    model_hash,
    read_weights,
)
from model import build_model


@dataclass
class Config:
    # the defaults are Table 3's for GLUE
    out: str = ""  # its folder; empty: out/<init_from>_<task>
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    task: str = ""  # of GLUE (sst2, ...), squad, docs, or a folder
    seed: int = 0  # for the head's weights, data order and dropout
    seeds: int = 1  # how many; the median is reported
    update_memory: bool = True  # False: the whole memory is frozen (Table 5)
    # data
    max_len: int = 128  # tokens of an example or a window
    doc_stride: int = 128  # tokens from one of SQuAD's windows to the next
    train_examples: int = 0  # examples or windows to train on; 0: all
    # optimization: AdamW; linear warm-up, then linear decay to 0
    batch_size: int = 32  # examples per step, of similar length
    accumulation: int = 1  # parts of a batch; a multiple of the ranks
    epochs: int = 10  # passes over the training examples
    max_steps: int = 0  # 0: as many as the epochs take
    warmup: float = 0.06  # share of the steps
    lr: float = 2e-5  # highest learning rate
    keys_lr: float = 1.0  # rate of the memory's sub-keys, as a factor of lr
    value_lr: float = 1e-3  # rate of the value tables, constant
    weight_decay: float = 0.1  # biases, norms and memories have none
    grad_clip: float = 1.0  # largest norm of all gradients but the values' (our reading); 0: any
    dropout: float = 0.1  # in embeddings, attention, FFN and the pooled [CLS] (our reading)
    # watching
    log_interval: int = 100  # steps between log records
    checkpoint_interval: int = 1000  # and after each epoch
    tensorboard: bool = False  # curves: tensorboard --logdir out
    # machine
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of matrix products: auto, float32, bfloat16 or float16
    compile: str = "auto"  # on, off, or auto: on CUDA

    MAY_BE_ZERO = ("seed", "train_examples", "max_steps", "warmup", "keys_lr", "value_lr",
                   "weight_decay", "grad_clip", "dropout")
    AT_MOST_ONE = ("warmup", "dropout")
    # settings that you may change when resuming
    MAY_CHANGE = ("out", "init_from", "seeds", "log_interval", "checkpoint_interval", "tensorboard",
                  "device", "compile")

    @property
    def warmup_steps(self):
        return round(self.warmup * self.max_steps)


def main(argv):
    config = load_settings(Config, argv)
    if not config.init_from:
        raise UserError("init_from is empty, which model? --init_from=RUN, or a recipe: "
                        "python finetune.py configs/demo_finetune.py starts from out/demo")
    ranks.check_accumulation(config)
    device, dtype = use_device(config.device, config.dtype)

    initial, vocab = find_weights(config.init_from)
    sizes = read_weights(initial)["config"]
    check_objective(initial, sizes, causal=False)
    if not 7 <= config.max_len <= sizes.max_len:  # a window of SQuAD needs 7
        raise UserError(f"max_len = {config.max_len}: expected 7 to {sizes.max_len}, the positions")
    trained = Run(initial.parent).settings().get("seq_len", sizes.max_len)
    if config.max_len > trained:
        print(f"max_len is beyond the {trained} tokens that {initial} was trained on: positions "
              "beyond are untrained, or its initial model's")
    with ranks.first_rank_first():
        task = find_task(config.task)
    encoding = text_tokenizer(vocab), config.max_len, config.doc_stride
    train = load_examples(task, "train", *encoding)
    dev = {suffix: load_examples(task, split, *encoding) for suffix, split in task.dev.items()}
    order = np.random.default_rng(0).permutation(len(train))  # for all seeds
    train = [train[n] for n in sorted(order[:config.train_examples or None])]
    steps = config.max_steps or config.epochs * math.ceil(len(train) / config.batch_size)
    config = replace(config, device=str(device), dtype=str(dtype).removeprefix("torch."),
                     max_steps=steps)

    fixed = "" if config.update_memory else "_fixed"
    out = Path(config.out or f"out/{Path(config.init_from).name}_{task.name}{fixed}")
    files = [task.file(split) for split in ("train", *task.dev.values())]
    data = {file.name: file_sha256(file) for file in files} | {"labels": task.labels}
    sha256 = model_hash(initial)
    for earlier in Run(out).seeds():
        before = earlier.settings()
        earlier.check_settings(replace(config, seed=before["seed"]), data)
        same = before["init_checkpoint"] == str(initial)  # an old run has no hash
        if "init_sha256" in before:
            same = before["init_sha256"] == sha256
        if not same:
            raise UserError(f"{earlier.folder} started from other weights than {initial} (from "
                            f"{before['init_checkpoint']}): give --init_from, or another "
                            "--out=out/NAME")
    signals = training.catch_signals()
    for seed in range(config.seed, config.seed + config.seeds):
        run = Run(out / f"seed{seed}")
        with lock(run.folder, "trains there"):
            if run.results():
                print(f"{run.folder} is done: --out=out/NAME starts anew")
            else:
                fine_tune(replace(config, seed=seed), run, task, data, train, dev, signals)
            if ranks.any_signalled(signals):
                print(f"stopped; go on with: python finetune.py {shlex.join(argv)}")
                return training.status_after(signals)
            for checkpoint in numbered(run.folder, CHECKPOINT).values():  # best/ stays
                discard(checkpoint)
        if ranks.first_rank():
            with lock(out, "writes medians", timeout=-1):  # other seeds may end now, too
                write_medians(task, out)
    return 0


def fine_tune(config, run, task, data, train, dev, signals):
    """Fine-tune with one seed, or go on. Afterwards `run` has results, unless a signal came."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    batches = TrainingBatches(train, config)

    # the model
    initial, vocab = find_weights(config.init_from)
    sizes = replace(read_weights(initial)["config"], dropout=config.dropout)
    torch.manual_seed(config.seed)  # of the head
    model = build_model(sizes, "span" if task.reads_spans else "classifier", task.labels)
    for layer in model.bert.layers:
        if layer.memory is not None and not config.update_memory:
            layer.memory.requires_grad_(False).eval()  # its batch norm keeps its statistics
            layer.memory.values.learns = False
    checkpoint = run.newest_checkpoint()
    if checkpoint:
        origin = run.settings()
        model.load_state_dict(read_weights(checkpoint)["weights"])
    else:
        origin = {**init_from(model, initial), "texts": task.texts}
    if ranks.get_world_size() > 1:
        from lib import sharding

        sharding.shard(model)
    model.to(device)
    torch.compiler.reset()  # torch limits recompilations; those of earlier seeds would count
    compiled = torch.compile(model) if wants_compile(config.compile, device) else model

    # the optimizers
    dense, sparse = training.make_optimizers(model, config, device)  # sparse: of the value tables
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": [],
             "best": -math.inf, "results": {}}
    if checkpoint:
        state = training.restore(checkpoint, dense, sparse, scaler)
    run.open(config, vocab, origin, data, state["step"])

    micro_batches = ranks.my_micro_batches(config.accumulation)
    recent = []  # (loss, norm) of the steps since the last log, still on the device
    start = time.perf_counter()
    for step in range(state["step"], config.max_steps):
        training.set_rate(dense, config, step)
        loss = 0.0
        for micro in micro_batches:
            training.seed_dropout(config.seed, step, micro)
            batch, weight = batches.get(step, micro)
            with autocast(device, dtype):
                part = compiled(**to_device(batch, device)) * weight
            scaler.scale(part).backward()
            loss += part.detach()
        if ranks.get_world_size() > 1:
            loss = sharding.merge(model, loss, len(micro_batches))
        norm = training.update(dense, sparse, scaler, config.grad_clip)

        recent.append((loss, norm))
        done = step + 1  # updates
        stopped = ranks.any_signalled(signals)
        epoch_ends = done % batches.steps_per_epoch == 0 or done == config.max_steps
        log = epoch_ends or training.is_due(done, config.log_interval, config)
        save = epoch_ends or stopped or training.is_due(done, config.checkpoint_interval, config)
        if not (log or save):
            continue

        recent = [(loss.item(), norm.item()) for loss, norm in recent]  # waits for the device
        training.check_finite(recent, config, done)
        state["step"] = done
        state["seconds"] += time.perf_counter() - start
        state["losses"] += [loss for loss, _ in recent]
        if log:
            state["elapsed"] += state["seconds"]
            training.log_training(run, state, config, batches, recent[-1][1])
            state["losses"], state["seconds"] = [], 0.0
        if epoch_ends:
            predictions = {suffix: predict_examples(model, examples, config.batch_size, dtype)
                           for suffix, examples in dev.items()}
            scores = score_dev(task, dev, predictions) | {"epoch": batches.epochs(done)}
            run.log({"step": done, **scores})
            score = scores[task.metrics[0]]
            print(f"epoch {scores['epoch']:g}: {task.metrics[0]} {score:.4f}", flush=True)
            score = float(np.nan_to_num(score, nan=-2))  # less than any number
            if score > state["best"]:
                state["best"] = score
                state["results"] = {f"eval_{name}": value for name, value in scores.items()}
                run.save_best(model_file(model, task.labels))
                write_predictions(run.folder, task, dev, predictions)
        if save:
            files = training.checkpoint_files(model, task.labels, dense, sparse, scaler, state)
            run.save_checkpoint(done, files, keep=1)
        if stopped:
            break
        recent = []
        start = time.perf_counter()

    if state["step"] == config.max_steps:
        run.write_results(state["results"])  # last: now the seed is done


class TrainingBatches:
    """Make the training batches of one seed, in random order.

    Examples are sorted by length within 64 batches at a time (our reading).
    """

    unit = "examples"

    def __init__(self, examples, config):
        self.examples = examples
        self.size = config.batch_size
        self.accumulation = config.accumulation
        self.steps_per_epoch = math.ceil(len(examples) / self.size)
        self.steps = []  # the examples of each step, by index
        lengths = np.array([len(example.ids) for example in examples])
        place = np.arange(len(examples))
        for epoch in range(math.ceil(config.max_steps / self.steps_per_epoch)):
            rng = np.random.default_rng([config.seed, ORDER, epoch])
            order = rng.permutation(len(examples))
            order = order[np.lexsort((lengths[order], place // (64 * self.size)))]
            batches = np.split(order, place[self.size::self.size])
            self.steps += [batches[n] for n in rng.permutation(len(batches))]

    def epochs(self, steps):
        """Return how often `steps` steps go through the examples."""
        return steps / self.steps_per_epoch

    def get(self, step, micro):
        """Return a micro-batch, arguments of a model as arrays, and its weight in the loss."""
        index = np.array_split(self.steps[step], self.accumulation)[micro]
        weight = len(index) / len(self.steps[step])
        if weight == 0:  # fewer examples than micro-batches, but each rank must compute something
            index = self.steps[step][:1]
        chosen = [self.examples[n] for n in index]
        return {**pad(chosen), "labels": np.array([example.label for example in chosen])}, weight


def write_predictions(folder, task, dev, predictions):
    """Write predictions_DEV.tsv with texts and labels, or SQuAD's official .json.

    dev, predictions: see score_dev.
    """
    for suffix, examples in dev.items():
        path = folder / f"predictions_{task.dev[suffix]}.tsv"
        if task.reads_spans:
            answers = best_answers(examples, predictions[suffix])
            texts = {question.id: text for question, (text, _) in answers.items()}
            write_text(path.with_suffix(".json"), json.dumps(texts, indent=1))
            continue
        header, cells = prediction_table(predictions[suffix], task.labels)
        table = [["index", *task.texts, "label", *header]]
        for n, (example, row) in enumerate(zip(examples, cells)):
            label = task.labels[example.label] if task.labels else example.label
            table.append([n, *example.texts, label, *row])
        write_text(path, tsv_text(table))


def write_medians(task, out):
    """Write the medians over all seeds in `out` that are done, and print the main one."""
    results = {run.settings()["seed"]: run.results() for run in Run(out).seeds() if run.results()}
    medians = {key: float(np.median([scores[key] for scores in results.values()]))
               for key in results[min(results)]}
    Run(out).write_results({**medians, "seeds": results})
    metric = task.metrics[0]
    print(f"median of {len(results)}: {metric} {medians[f'eval_{metric}']:.4f}; "
          f"{out}/eval_results.json")


if __name__ == "__main__":
    ranks.run_ranks(lambda: main(sys.argv[1:]))
