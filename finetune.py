"""
Fine-tune a pretrained model, with or without memory, on GLUE, SQuAD 1.1 or data of your own.

$ python finetune.py configs/demo_finetune.py         # after configs/demo.py; minutes, no network
$ python finetune.py configs/finetune_glue.py --task=SST-2 --init_from=out/base_resm_init --seeds=5
$ python finetune.py configs/finetune_squad.py --init_from=out/base_resm_init

A task of your own is a folder with train.tsv and dev.tsv, whose header names the columns `sentence`
(or `sentence1` and `sentence2`) and `label` (or `score`, a number): --task=FOLDER. The same command
goes on where a stopped run left off; --key=value overrides any setting below.
"""
import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import model as bert
import tasks
from configs import (
    Failure,
    UserError,
    at_least,
    atomic,
    catch_signals,
    discard,
    keep_freed_memory,
    load,
    run,
    setup,
)
from measure import check_same_run
from model import check_finite, learning_rate, open_log
from prepare_data import build_tokenizer, read_vocab, vocab_hash


@dataclass
class Config:
    # the run; the defaults are Table 3's for GLUE
    out: str = ""  # its folder, with a seed0/ in it; by default out/<init_from>_<task>
    init_from: str = ""  # a run, a folder in Hugging Face layout, or bert-base-uncased and such
    task: str = ""  # cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, squad, docs, or a folder
    seed: int = 0  # of the head's weights, data order and dropout
    seeds: int = 1  # how many: seed, seed + 1, ..., one after the other; the median is reported
    update_memory: bool = True  # False: value tables stay as they are (Table 5)
    # data
    max_len: int = 128  # tokens
    doc_stride: int = 128  # of SQuAD's windows, in tokens
    train_examples: int = 0  # train on so many of the examples or windows; 0: all
    # optimization: AdamW, linear warm-up, then linear decay to 0
    batch_size: int = 32  # our reading: the column is empty in our copy of Table 3
    epochs: int = 10
    max_steps: int = 0  # 0: so many as the epochs take
    warmup: float = 0.06  # share of the steps
    lr: float = 2e-5
    value_lr: float = 1e-3  # of the value tables, constant, as in pretraining (our reading)
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # norm of all gradients but the value tables' (Devlin et al.)
    dropout: float = 0.1
    # watching
    log_interval: int = 100
    checkpoint_interval: int = 1000  # steps; the end of an epoch is always saved
    # machine
    device: str = "auto"  # cuda, mps, cpu
    dtype: str = "auto"  # float32, bfloat16, float16
    compile: str = "auto"  # on, off; auto: on CUDA

    @property
    def warmup_steps(self):
        return round(self.warmup * self.max_steps)


# A run can be continued under other values of these; the rest make it another run.
MAY_CHANGE = {"out", "seeds", "log_interval", "checkpoint_interval", "device", "compile"}


class Data:
    """A task's examples, tokenized once for all seeds: `train`, and by name, as in its Task, `dev`
    and `test`. `chosen` are the training examples that count."""

    def __init__(self, task, tokenizer, config):
        def read(split):
            return tasks.examples(task, split, tokenizer, config.max_len, config.doc_stride)

        self.task, self.pad_id = task, tasks.special_ids(tokenizer)[0]
        self.train = read("train")
        if not self.train.ids:
            raise UserError(f"{task.folder}: nothing to train on")
        self.dev = {name: read(split) for name, split in task.dev.items()}
        self.test = {name: read(split) for name, split in task.test.items()
                     if tasks.file(task, split).exists()}
        chosen = np.random.default_rng(0).permutation(len(self.train.ids))  # the same in all seeds
        self.chosen = np.sort(chosen[:config.train_examples or None])

    def report(self, config):
        lengths = self.train.lengths[self.chosen]
        print(f"{self.task.name}: {len(lengths):,} of {len(self.train.ids):,} training examples, "
              f"{lengths.mean():.1f} tokens each, " + ", ".join(
                  f"{len(part.ids):,} dev{name}" for name, part in self.dev.items())
              + f"; {config.epochs} epochs of batches of {config.batch_size} = "
              f"{config.max_steps:,} steps, {config.warmup_steps:,} of them warm-up")
        if self.task.labels:  # a list that a person can check
            share = np.bincount(self.train.labels[self.chosen]) / len(lengths)
            dev = [np.bincount(part.labels).max() / len(part.ids) for part in self.dev.values()]
            print("labels: " + ", ".join(f"{label} {n:.1%}" for label, n in
                                         zip(self.task.labels, share, strict=False))
                  + "; the most frequent one is " + ", ".join(f"{n:.1%}" for n in dev) + " of dev")


class Trainer:
    """Model, optimizer and data of a run: a training step, and predictions."""

    def __init__(self, config, data, model, device, dtype):
        self.config, self.data, self.device, self.dtype = config, data, device, dtype
        self.model, self.tables = model.to(device), bert.value_tables(model).values()
        for table in self.tables:
            table.weight.requires_grad_(config.update_memory)
        self.optimizer = bert.adamw(model, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.compiled = bert.compiled(model, config.compile, device)
        self.epoch = self.order = None

    def batch(self, step):
        """The numbers of the examples of a step: a function of (seed, step)."""
        epoch, i = divmod(step, steps_per_epoch(self.data, self.config))
        if epoch != self.epoch:
            rng = np.random.default_rng([self.config.seed, 1, epoch])
            lengths = self.data.train.lengths[self.data.chosen]
            self.order, self.epoch = tasks.batches(lengths, self.config.batch_size, rng), epoch
        return self.data.chosen[self.order[i]]

    def forward(self, model, examples, index):
        """Logits in float32, and the mask of the real tokens (batch, time)."""
        batch = examples.pad(index, self.data.pad_id, 8 if self.device.type == "cuda" else 1)
        ids, types, lengths = (torch.from_numpy(part).to(self.device) for part in batch)
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        padded = batch[2].min() < ids.shape[1]  # without padding, attention takes a faster path
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = model(ids, mask if padded else None, types)
        return logits.float(), mask

    def step(self, step):
        """One update. Returns the loss and the gradient norm, on the device."""
        config, train, index = self.config, self.data.train, self.batch(step)
        torch.manual_seed(int(np.random.SeedSequence([config.seed, 3, step]).generate_state(1)[0]))
        logits, mask = self.forward(self.compiled, train, index)
        loss = loss_of(logits, torch.from_numpy(train.labels[index]).to(self.device), mask)
        self.scaler.scale(loss).backward()
        norm = bert.update(self.optimizer, self.scaler, self.tables, config,
                           learning_rate(step, config))
        return loss.detach(), norm

    @torch.no_grad()
    def predict(self, examples):
        """Classes or scores (n,); of SQuAD, texts by question id."""
        scores, found = np.empty(len(examples.ids)), {}
        self.model.eval()  # the raw one: the compiled one would be compiled again
        for index in tasks.batches(examples.lengths, self.config.batch_size):
            logits, mask = self.forward(self.model, examples, index)
            if self.data.task.name == "squad":
                first = torch.from_numpy(examples.first[index]).to(self.device)
                best, spans = best_spans(logits, mask, first)
                scores[index] = best.cpu()
                found.update(zip(index, spans.tolist(), strict=True))
            else:
                scores[index] = (logits.argmax(1) if self.data.task.labels else logits[:, 0]).cpu()
        self.model.train()
        if found:
            return tasks.answers(examples, scores, np.array([found[n] for n in range(len(scores))]))
        return scores.astype(int) if self.data.task.labels else scores

    def evaluate(self):
        """Every metric of the dev splits, and what was predicted for them."""
        predictions = {name: self.predict(part) for name, part in self.data.dev.items()}
        if self.data.task.name == "squad":
            return tasks.score_squad(self.data.dev[""].questions, predictions[""]), predictions
        return {metric + name: tasks.METRICS[metric](part.labels, predictions[name])
                for name, part in self.data.dev.items()
                for metric in self.data.task.metrics}, predictions

    def save(self, out, state):
        state = {**state, "scaler": self.scaler.state_dict()}
        bert.save_checkpoint(out, state["step"], self.model, self.optimizer, state, keep=1,
                             labels=self.data.task.labels)

    def restore(self, checkpoint):
        state = bert.load_optimizer(checkpoint, self.model, self.optimizer)
        self.scaler.load_state_dict(state.pop("scaler"))
        return state


def loss_of(logits, labels, mask):
    """Cross-entropy of classes (batch,), of starts and ends (batch, 2) among the real tokens, or
    the mean squared error of scores."""
    if labels.is_floating_point():
        return F.mse_loss(logits[:, 0], labels)
    if labels.dim() == 2:
        logits = logits.masked_fill(~mask[..., None], -torch.inf)  # (batch, time, 2)
    return F.cross_entropy(logits, labels)


def best_spans(logits, mask, first, n=20, longest=30):
    """The best span of each window's paragraph: of the n best starts and n best ends, the pair of
    the highest sum that is at most `longest` tokens long (Devlin et al.).

    logits: (batch, time, 2); first: (batch,), where the paragraph begins; it ends before the last
    token, a [SEP]. Returns its score, -inf where there is none, and its start and end (batch, 2).
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    inside = mask & (place >= first[:, None]) & (place < mask.sum(1)[:, None] - 1)
    logits = logits.masked_fill(~inside[..., None], -torch.inf)
    best, places = logits.topk(min(n, mask.shape[1]), 1)  # (batch, n, 2)
    starts, ends = places[:, :, None, 0], places[:, None, :, 1]
    scores = best[:, :, None, 0] + best[:, None, :, 1]  # (batch, n starts, n ends)
    scores = scores.masked_fill((ends < starts) | (ends >= starts + longest), -torch.inf).flatten(1)
    score, chosen = scores.max(1)
    spans = torch.stack(torch.broadcast_tensors(starts, ends), 3).flatten(1, 2)  # (batch, n * n, 2)
    return score, spans[torch.arange(len(chosen), device=mask.device), chosen]


def steps_per_epoch(data, config):
    return math.ceil(len(data.chosen) / config.batch_size)


def train(config, out, trainer, state, signals):
    """The training loop, from state["step"] on; everything is written to the folder `out`. Returns
    whether a signal stopped it."""
    def better(results, best):
        quality, old = (-math.inf if math.isnan(r[metric]) else r[metric] for r in (results, best))
        return quality > old

    metric, per_epoch = trainer.data.task.metrics[0], steps_per_epoch(trainer.data, config)
    log = open_log(out, state["step"])
    new, mark = [], time.perf_counter()  # new: (loss, norm) on the device, not looked at yet
    for step in range(state["step"] + 1, config.max_steps + 1):
        new.append(trainer.step(step - 1))
        stopped = signals[:1]
        ends = step % per_epoch == 0 or step == config.max_steps
        saves = ends or stopped or step % config.checkpoint_interval == 0
        if not saves and step % config.log_interval:
            continue
        new = [(loss.item(), norm.item()) for loss, norm in new]  # waits for the device
        check_finite(step, new, config, trainer.dtype)
        state["seconds"] += time.perf_counter() - mark
        state["losses"] += [loss for loss, _ in new]
        state["step"] = step
        if ends or step % config.log_interval == 0:
            rate = len(state["losses"]) * config.batch_size / state["seconds"]
            state["elapsed"] += state["seconds"]
            record = {"step": step, "epoch": step / per_epoch, "loss": np.mean(state["losses"]),
                      "lr": learning_rate(step - 1, config), "grad_norm": new[-1][1],
                      "examples_per_s": rate, "elapsed": state["elapsed"]}
            eta = timedelta(seconds=round((config.max_steps - step) * config.batch_size / rate))
            print(json.dumps(record), file=log)
            print(f"step {step:,}/{config.max_steps:,} | epoch {record['epoch']:.2f} | loss "
                  f"{record['loss']:.4f} | {rate:,.0f} examples/s | lr {record['lr']:.2e} | eta "
                  f"{eta}", flush=True)
            state.update(losses=[], seconds=0.0)
        if ends:
            results, _ = trainer.evaluate()
            state["last"] = {"epoch": step / per_epoch, **results}
            print(json.dumps({"step": step, **state["last"]}), file=log)
            print(f"epoch {step / per_epoch:g}: {describe(results)}", flush=True)
            if state["best"] is None or better(results, state["best"]):
                state["best"] = state["last"]
                discard(out / "best")
                content = bert.model_file(trainer.model, trainer.data.task.labels)
                bert.save_files(out / "best", {"model": content})
        if saves:
            os.fsync(log.fileno())  # no checkpoint is newer than its log
            trainer.save(out, state)
        if stopped:
            return True
        new, mark = [], time.perf_counter()
    return False


def describe(results):
    """Metrics as a person reads them: GLUE's are shares of 1, SQuAD's percent already."""
    scale = 1 if "exact_match" in results else 100
    return ", ".join(f"{name} {scale * value:.2f}" for name, value in results.items())


def write_predictions(out, trainer, state):
    """What the best epoch's model predicts for dev, and for test as GLUE wants it submitted; and
    its metrics, named as Hugging Face's scripts name them."""
    task, data = trainer.data.task, trainer.data
    weights = bert.load_file(out / "best" / "model.pt")["weights"]
    bert.load_weights(trainer.model, weights, out / "best")
    results, predictions = trainer.evaluate()
    if task.name == "squad":
        with atomic(out / "predictions.json") as path:
            path.write_text(json.dumps(predictions[""], indent=1))
    else:
        for name, found in predictions.items():
            write_tsv(out / f"predictions{name}.tsv", task, found)
        for name, examples in data.test.items():
            found = trainer.predict(examples)
            if not task.labels:  # no score outside the training data's, which is 0 to 5 in STS-B
                found = found.clip(data.train.labels.min(), data.train.labels.max())
            write_tsv(out / "submission" / f"{name}.tsv", task, found)
    samples = {f"samples{name}": len(set(part.question) if task.name == "squad" else part.ids)
               for name, part in data.dev.items()}
    final = {"epoch": state["best"]["epoch"], **{f"eval_{key}": value for key, value in
                                                 {**results, **samples}.items()},
             "last_epoch": state["last"]["epoch"],
             **{f"last_{key}": state["last"][key] for key in results}}
    with atomic(out / "eval_results.json") as path:
        path.write_text(json.dumps(final, indent=1))


def write_tsv(path, task, predictions):
    texts = [task.labels[n] for n in predictions] if task.labels else [
        f"{score:.3f}" for score in predictions]
    with atomic(path) as temporary:
        temporary.write_text("index\tprediction\n" + "".join(
            f"{n}\t{text}\n" for n, text in enumerate(texts)), encoding="utf-8")


def run_seed(config, out, data, initial, vocab, device, dtype, signals):
    """Train from the weights `initial`, or go on, in the folder `out`, and leave eval_results.json
    there, unless a signal comes."""
    if (out / "config.json").exists():
        check_same_run(config, out, MAY_CHANGE)
    if (out / "eval_results.json").exists():
        print(f"{out} is done: --out=out/NAME starts anew")
        return
    checkpoint = bert.find_checkpoint(out)
    saved = bert.read_weights(checkpoint or initial)
    sizes = bert.BertConfig(**{**saved["config"], "dropout": config.dropout})
    if config.max_len > sizes.max_len:
        raise UserError(f"max_len = {config.max_len}: {initial} has {sizes.max_len} positions")
    torch.compiler.reset()  # what an earlier seed compiled counts towards a limit
    torch.manual_seed(config.seed)  # of the head
    labels = data.task.labels
    model = bert.build_model(sizes, "span" if data.task.name == "squad" else "classifier", labels)
    if checkpoint:
        bert.load_weights(model, saved["weights"], checkpoint)
    else:
        bert.init_from(model, initial)
    trainer = Trainer(config, data, model, device, dtype)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": [], "best": None, "last": None}
    if checkpoint:
        state = trainer.restore(checkpoint)
        print(f"going on from {checkpoint}")
    else:
        with atomic(out / "vocab.txt") as temporary:  # a run can be used without its initial model
            shutil.copyfile(vocab, temporary)
        settings = {**asdict(config), "init_checkpoint": str(initial), "first_step": 0,
                    "tokenizer_hash": vocab_hash(read_vocab(vocab))}
        with atomic(out / "config.json") as temporary:
            temporary.write_text(json.dumps(settings, indent=1))
    for file in out.glob(".tmp_*"):
        discard(file)  # what a killed process left behind
    if not train(config, out, trainer, state, signals):
        write_predictions(out, trainer, state)


def summarize(config, out):
    """<out>/eval_results.json: the medians over the seeds, and each seed's."""
    seeds = range(config.seed, config.seed + config.seeds)
    each = {seed: json.loads((out / f"seed{seed}" / "eval_results.json").read_text())
            for seed in seeds}
    median = {key: float(np.median([results[key] for results in each.values()]))
              for key in each[config.seed]}
    with atomic(out / "eval_results.json") as temporary:
        temporary.write_text(json.dumps({**median, "seeds": each}, indent=1))

    def line(results):
        return describe({key.removeprefix("eval_"): value for key, value in results.items()
                         if key.startswith("eval_") and "samples" not in key})
    for seed, results in each.items():
        print(f"seed {seed}: {line(results)} (best epoch: {results['epoch']:g})")
    if len(each) > 1:
        print(f"median of {len(each)}: {line(median)}")
    print(f"done: {out}/eval_results.json")


def main(argv):
    if not argv:
        raise UserError("which config? python finetune.py configs/demo_finetune.py; --help lists "
                        "settings")
    config = load(Config, argv)
    at_least(config, {"seed": 0, "seeds": 1, "max_len": 8, "doc_stride": 1, "train_examples": 0,
                          "batch_size": 1, "epochs": 1, "max_steps": 0, "warmup": 0, "lr": 0,
                          "value_lr": 0, "weight_decay": 0, "grad_clip": 1e-9, "log_interval": 1,
                          "checkpoint_interval": 1})
    if not config.init_from:
        raise UserError("init_from is empty: --init_from=out/RUN, or bert-base-uncased")
    initial, vocab = bert.find_weights(config.init_from)
    name = f"{vocab.parent.name}_{tasks.name_of(config.task)}"
    out = Path(config.out or f"out/{name}{'' if config.update_memory else '_fixed'}")
    device, dtype = setup(config.device, config.dtype, config.seed)
    keep_freed_memory(device)
    config.device, config.dtype = str(device), str(dtype).removeprefix("torch.")  # resolved
    tokenizer = build_tokenizer(vocab)
    tokenizer.encode_special_tokens = True  # a "[SEP]" in a text is text, not the token
    data = Data(tasks.find(config.task), tokenizer, config)
    config.max_steps = config.max_steps or config.epochs * steps_per_epoch(data, config)
    data.report(config)
    signals = catch_signals()
    for seed in range(config.seed, config.seed + config.seeds):
        run_seed(replace(config, seed=seed), out / f"seed{seed}", data, initial, vocab, device,
                 dtype, signals)
        if signals:
            print(f"stopped; go on with: python finetune.py {shlex.join(argv)}")
            return 128 + signals[0]
    summarize(config, out)
    return 0


def script():
    try:
        return main(sys.argv[1:])
    except torch.OutOfMemoryError as error:
        raise Failure(f"{str(error).splitlines()[0]} Try a smaller batch_size, max_len") from None


if __name__ == "__main__":
    run(script)
