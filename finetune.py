"""
Fine-tune a pretrained model, with or without memory, on GLUE, SQuAD 1.1 or a task of your own.

$ python finetune.py configs/demo_finetune.py         # after configs/demo.py; minutes, no network
$ python finetune.py configs/finetune_glue.py --task=SST-2 --init_from=out/base_resm_init --seeds=5
$ python finetune.py configs/finetune_squad.py --init_from=out/base_resm_init
$ torchrun --standalone --nproc_per_node=4 finetune.py CONFIG --accumulation=4  # ranks share a batch

A task of your own is a folder with train.tsv and dev.tsv, whose header names the columns `sentence`
(or `sentence1` and `sentence2`) and `label` (or `score`, a number): --task=FOLDER. The same command
goes on where a stopped run left off; --key=value overrides any setting below. One process at a
time trains in a folder.

out/<run>/seed0/{config.json,log.jsonl,vocab.txt,step_000500/}     as pretrain.py's; the newest one
out/<run>/seed0/best_epoch_2/    while it trains: the best epoch's weights; in the end renamed best/
out/<run>/seed0/{eval_results.json,predictions_dev.tsv,submission/} of the weights in best/
out/<run>/eval_results.json      the medians over the seeds, and each seed's
"""
import json
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lib.common.device import use_device
from lib.common.errors import UserError, need
from lib.common.files import lock, write_text
from lib.common.settings import DTYPES, ON_OFF, load_settings, setting
from lib.corpus.vocabulary import special_ids, text_tokenizer
from lib.distributed.processes import (
    any_signalled,
    first_rank_first,
    max_over_ranks,
    my_micro_batches,
    run_ranks,
    set_timeout,
)
from lib.tasks.glue import batches_by_length, find_task, read_split, row_names, task_name, tsv_text
from lib.tasks.predict import predict_examples, prediction_rows
from lib.tasks.scores import METRICS, score_squad
from lib.tasks.squad import best_answers, load_examples
from lib.training.trainer import Schedule, State, Trainer, catch_signals
from lib.weights.checkpoint import (
    check_objective,
    find_weights,
    init_from,
    load_model,
    load_weights,
    model_file,
    read_weights,
)
from lib.weights.run import Run
from model import BertConfig, build_model, value_tables


@dataclass
class Config:
    # the run; the defaults are Table 3's for GLUE
    out: str = setting("", "its folder; by default out/<init_from>_<task>", may_change=True)
    init_from: str = setting("", "a run, a Hugging Face folder, or a name: bert-base-uncased")
    task: str = setting("", "of GLUE (sst2, ...), squad, docs, or a folder")
    seed: int = setting(0, "of the head's weights, data order and dropout", least=0)
    seeds: int = setting(1, "how many; the median is reported", least=1, may_change=True)
    update_memory: bool = setting(True, "False: the value tables are frozen (Table 5)")
    # data
    max_len: int = setting(128, "tokens", least=8)
    doc_stride: int = setting(128, "of SQuAD's windows, in tokens", least=1)
    train_examples: int = setting(0, "examples or windows to train on; 0: all", least=0)
    # optimization: AdamW, linear warm-up, then linear decay to 0
    batch_size: int = setting(32, "our reading: the column is empty in Table 3", least=1)
    accumulation: int = setting(1, "parts of a batch; a multiple of the ranks", least=1)
    epochs: int = setting(10, "", least=1)
    max_steps: int = setting(0, "0: as many as the epochs take", least=0)
    warmup: float = setting(0.06, "share of the steps", least=0)
    lr: float = setting(2e-5, "", least=0)
    keys_lr: float = setting(1.0, "of the memory's sub-keys, as a factor of lr", least=0)
    value_lr: float = setting(1e-3, "of the value tables, constant (our reading)", least=0)
    weight_decay: float = setting(0.1, "", least=0)
    grad_clip: float = setting(1.0, "norm of all gradients but the value tables'", least=1e-9)
    dropout: float = setting(0.1, "")
    # watching
    log_interval: int = setting(100, "", least=1, may_change=True)
    checkpoint_interval: int = setting(1000, "and after each epoch", least=1, may_change=True)
    tensorboard: bool = setting(False, "curves: tensorboard --logdir out", may_change=True)
    # machine
    device: str = setting("auto", "cuda, mps, cpu", may_change=True)
    dtype: str = setting("auto", "of matrix products", choices=DTYPES)
    compile: str = setting("auto", "auto: on CUDA", choices=ON_OFF, may_change=True)
    rank_timeout: int = setting(600, "seconds to wait for a rank", least=1, may_change=True)


class Data:
    """The Examples of a task, tokenized once for all seeds: train, and dev and test by the names in
    the Task. Its training batches, for the Trainer, are a function of (seed, step)."""

    unit = "examples"

    def __init__(self, task, tokenizer, config):
        def read(split):
            return load_examples(task, split, tokenizer, config.max_len, config.doc_stride)

        self.task, self.is_squad = task, task.name == "squad"
        self.train = read("train")
        if not self.train.ids:
            raise UserError(f"{task.folder}: nothing to train on")
        self.dev = {name: read(split) for name, split in task.dev.items()}
        self.test = {name: read(split) for name, split in task.test.items()
                     if task.file(split).exists()}
        self.row_names = {name: row_names(task, task.test[name]) for name in self.test}
        order = np.random.default_rng(0).permutation(len(self.train.ids))  # the same for all seeds
        self.chosen = np.sort(order[:config.train_examples or None])
        self.config, self.size, self.drawn = config, config.batch_size, None
        self.accumulation = config.accumulation
        self.steps_per_epoch = math.ceil(len(self.chosen) / self.size)
        on_cuda = config.device.startswith("cuda")  # there lengths are multiples of 8
        self.padding = special_ids(tokenizer)[0], 8 if on_cuda else 1

    def epochs(self, steps):
        return steps / self.steps_per_epoch

    def parts(self, step):
        """The indices of a training batch, in micro-batches of as many examples or one less."""
        epoch, i = divmod(step, self.steps_per_epoch)
        key = [self.config.seed, 1, epoch]
        if self.drawn != key:
            lengths = self.train.lengths[self.chosen]
            self.order = batches_by_length(lengths, self.size, np.random.default_rng(key))
            self.drawn = key
        return np.array_split(self.chosen[self.order[i]], self.accumulation)

    def share(self, step, micro):
        parts = self.parts(step)
        return len(parts[micro]) / sum(map(len, parts))

    def get(self, step, micro=0):
        """A micro-batch: the arguments of a model, as arrays."""
        parts = self.parts(step)
        index = parts[micro] if len(parts[micro]) else parts[0][:1]  # its share is 0
        return {**self.train.pad(index, *self.padding), "labels": self.train.labels[index]}

    def report(self, config):
        """Print the sizes and how often each label occurs, for a person to check."""
        for name, part in [("train", self.train), *self.dev.items()]:
            shares = [f", {label} {(part.labels == n).mean():.1%}"
                      for n, label in enumerate(self.task.labels or ())]
            print(f"{self.task.dev.get(name, name)}: {len(part.ids):,} examples, "
                  f"{part.lengths.mean():.1f} tokens each{''.join(shares)}")
        if self.task.labels:
            most = np.bincount(self.train.labels).argmax()
            shares = [f"{(part.labels == most).mean():.1%} of {self.task.dev[name]}"
                      for name, part in self.dev.items()]
            print(f"always saying {self.task.labels[most]}, the most frequent class of train, "
                  f"would be right for {', '.join(shares)}")
        print(f"{len(self.chosen):,} training examples, {config.max_steps:,} steps of {self.size}, "
              f"{round(config.warmup * config.max_steps):,} of them warm-up")


def predict(trainer, examples):
    """As predictions.predict, for the task that is trained."""
    data = trainer.batches
    return predict_examples(trainer.model, examples, data.task.labels, data.size, data.padding,
                               trainer.device, trainer.dtype)


def evaluate(trainer):
    """The metrics of the dev splits, and what predict says of each."""
    data = trainer.batches
    found = {name: predict(trainer, part) for name, part in data.dev.items()}
    if data.is_squad:
        part = data.dev[""]
        return score_squad(part.questions, best_answers(part, *found[""])), found
    said = {name: each.argmax(1) if data.task.labels else each for name, each in found.items()}
    return {metric + name: float(METRICS[metric](part.labels, said[name]))
            for name, part in data.dev.items() for metric in data.task.metrics}, found


def train(trainer, run, state, signals):
    """Train to the end, and score the dev splits after each epoch.

    The weights of the best epoch are in the run's folder before a checkpoint names them. Returns
    what `evaluate` returned for the best epoch, or None if an earlier process scored it.
    """
    config, data, best = trainer.config, trainer.batches, None

    def due(step):
        if step % data.steps_per_epoch == 0 or step == config.max_steps:
            return {"log", "evaluate", "save"}
        every = {"log": config.log_interval, "save": config.checkpoint_interval}
        return {what for what, n in every.items() if step % n == 0}

    def quality(results):
        return np.nan_to_num(results[data.task.metrics[0]], nan=-np.inf)

    def evaluate_epoch(step):
        nonlocal best
        results, found = evaluate(trainer)
        state.last = {"epoch": data.epochs(step), **results}
        run.log({"step": step, **state.last})
        print(f"epoch {data.epochs(step):g}: {describe(data.task, results)}", flush=True)
        if state.best is None or quality(results) > quality(state.best):
            state.best, best = state.last, (results, found)
            run.save_best(state.best["epoch"], model_file(trainer.model, data.task.labels))

    trainer.train(run, state, due, evaluate_epoch, signals)
    return best


def describe(task, results, prefix=""):
    """Metrics for a person: SQuAD's are in percent already, GLUE's shares are shown in percent."""
    scale = 1 if task.name == "squad" else 100
    return ", ".join(f"{metric}{name} {scale * results[prefix + metric + name]:.2f}"
                     for name in task.dev for metric in task.metrics)


def write_predictions(trainer, run, state, evaluated):
    """The predictions of the best epoch's model: for dev beside the texts and labels, of SQuAD as
    the official script reads them; for test in the form that GLUE wants; and its metrics under the
    names of Hugging Face's scripts. evaluated: what `train` returned."""
    data, out, best = trainer.batches, run.folder, run.finish_best(state.best["epoch"])
    trainer.model = load_model(best).to(trainer.device)  # whole on every rank
    results, found = evaluated or evaluate(trainer)
    for name, split in data.task.dev.items():
        path, predicted = out / f"predictions_{split}", found[name]
        if data.is_squad:
            write(path, best_answers(data.dev[name], *predicted))
            continue
        texts, labels = read_split(data.task, split)
        header, said = prediction_rows(predicted, data.task.labels)
        gold = [data.task.labels[n] for n in labels] if data.task.labels else labels.tolist()
        columns = ["sentence"] if len(texts[0]) == 1 else ["sentence1", "sentence2"]
        write(path, [["index", *columns, "label", *header], *(
            [n, *text, label, *row]
            for n, (text, label, row) in enumerate(zip(texts, gold, said, strict=True)))])
    for name, examples in data.test.items():
        predicted = predict(trainer, examples)
        if not data.task.labels:  # scores in the range of the training data's
            predicted = predicted.clip(data.train.labels.min(), data.train.labels.max())
        _, said = prediction_rows(predicted, data.task.labels)
        rows = zip(data.row_names[name], [row[0] for row in said], strict=True)
        write(out / "submission" / name, [["index", "prediction"], *rows])
    for name, part in data.dev.items():
        results[f"samples{name}"] = len(part.questions if data.is_squad else part.ids)
    results = {f"eval_{key}": value for key, value in results.items()}
    last = {f"last_{key}": value for key, value in state.last.items()}
    run.write_results({"epoch": state.best["epoch"], **results, **last})


def write(path, content):
    """Write a dict to path.json, or rows to path.tsv."""
    if isinstance(content, dict):
        suffix, text = ".json", json.dumps(content, indent=1)
    else:
        suffix, text = ".tsv", tsv_text(content)
    write_text(f"{path}{suffix}", text)


def run_seed(config, run, data, sizes, initial, vocab, signals):
    """Train a model of these sizes (a BertConfig) from the weights `initial`, or resume `run`.
    Unless a signal comes, it has results in the end."""
    if run.has_begun():
        run.check_settings(config)
    if run.has_results():
        print(f"{run.folder} is done: --out=out/NAME starts anew")
        return
    torch.compiler.reset()  # what an earlier seed compiled counts towards a limit
    torch.manual_seed(config.seed)  # of the head
    model = build_model(sizes, "span" if data.is_squad else "classifier", data.task.labels)
    for values in value_tables(model).values():
        values.weight.requires_grad_(config.update_memory)
    newest = run.newest_checkpoint()
    if newest:
        load_weights(model, read_weights(newest)["weights"], newest)
    else:
        origin = init_from(model, initial)
    schedule = Schedule(config.lr, round(config.warmup * config.max_steps), config.max_steps)
    trainer = Trainer(config, schedule, model, data, torch.device(config.device),
                      getattr(torch, config.dtype), labels=data.task.labels)
    if newest:
        state = trainer.restore(newest)
    else:
        state = State()
        run.begin(config, vocab, origin=origin)
    run.open(state.step, state.best and state.best["epoch"], config.tensorboard)
    evaluated = train(trainer, run, state, signals)
    if not any_signalled(signals):
        write_predictions(trainer, run, state, evaluated)


def summarize(task, out, each):
    """Write and print the medians over the seeds: <out>/eval_results.json has them, and each
    seed's results. each: {seed: results}."""
    for seed, results in each.items():
        print(f"seed {seed}: {describe(task, results, 'eval_')}; best epoch {results['epoch']:g}")
    median = {key: float(np.median([results[key] for results in each.values()]))
              for key in each[min(each)]}
    Run(out).write_results({**median, "seeds": each})
    print(f"median of {len(each)}: {describe(task, median, 'eval_')}; {out}/eval_results.json")


def main(argv):
    config = load_settings(Config, argv)
    if config.tensorboard:
        need("tensorboard", "tensorboard = True")
    if not config.init_from:
        raise UserError("init_from is empty, which model? --init_from=RUN, or a recipe: "
                               "python finetune.py configs/demo_finetune.py starts from out/demo")
    set_timeout(config.rank_timeout)
    my_micro_batches(config.accumulation)  # a mistake is said before anything is read
    initial, vocab = find_weights(config.init_from)
    sizes = BertConfig(**{**read_weights(initial)["config"], "dropout": config.dropout})
    check_objective(initial, vars(sizes), causal=False)
    if config.max_len > sizes.max_len:
        raise UserError(f"max_len = {config.max_len}: there are {sizes.max_len} positions")
    is_seed = re.fullmatch(r"seed\d+", vocab.parent.name)
    run = vocab.parent.parent if is_seed else vocab.parent
    name = f"{run.name}_{task_name(config.task)}"
    out = Path(config.out or f"out/{name}{'' if config.update_memory else '_fixed'}")
    device, dtype = use_device(config.device, config.dtype)
    config.device, config.dtype = str(device), str(dtype).removeprefix("torch.")  # resolved
    tokenizer = text_tokenizer(vocab)
    with first_rank_first():
        task = find_task(config.task)
    data = Data(task, tokenizer, config)
    config.max_steps = config.max_steps or config.epochs * data.steps_per_epoch
    data.report(config)
    with lock(out, "trains there"):
        return run_seeds(config, out, data, sizes, initial, vocab, argv)


def run_seeds(config, out, data, sizes, initial, vocab, argv):
    """One seed after the other, each in its folder. Returns the exit status."""
    max_over_ranks()  # the first one has the lock
    signals, each = catch_signals(), {}
    for seed in range(config.seed, config.seed + config.seeds):
        config.seed, run = seed, Run(out / f"seed{seed}")
        run_seed(config, run, data, sizes, initial, vocab, signals)
        if any_signalled(signals):
            print(f"stopped; go on with: python finetune.py {shlex.join(argv)}")
            return 128 + signals[0]
        max_over_ranks()  # the first one has written it
        each[seed] = run.results()
    summarize(data.task, out, each)
    return 0


if __name__ == "__main__":
    run_ranks(lambda: main(sys.argv[1:]))
