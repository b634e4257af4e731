"""
Training: the optimizers, the one loop that pretrain.py and finetune.py share, and a run's folder.

out/<run>/config.json     the settings, and where the run started
out/<run>/log.jsonl       one JSON object a line: losses, and evaluations
out/<run>/vocab.txt       its vocabulary
out/<run>/step_000500/    a checkpoint (see checkpoint.py)
"""
import json
import math
import os
import re
import shutil
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

import ranks
from checkpoint import load_optimizers, save_checkpoint
from common import Failure, UserError, atomic, discard, write_text
from data import MASKED, read_vocab, vocab_hash
from model import value_tables
from scalars import Scalars
from values import LazyAdam


class Trainer:
    """A model in training.

    config: has seed, lr, warmup_steps, max_steps, value_lr, weight_decay, grad_clip, compile
    and keep_checkpoints.
    batches: batches.get(step, micro) is a micro-batch, arrays by the name of the model's argument;
    a step has batches.accumulation of them, in all batches.size `batches.unit` (tokens, examples);
    batches.share(step, micro) is the weight of its loss in the step's mean.
    flops: operations of a training step per unit, for the log's mfu, or None.
    labels: names of a Classifier's classes, for its checkpoints.
    """

    def __init__(self, config, model, batches, device, dtype, flops=None, labels=()):
        self.config, self.batches = config, batches
        self.flops, self.labels = flops, labels
        self.model, self.device, self.dtype = model.to(device), device, dtype
        self.micro_batches = ranks.micro_batches(batches.accumulation)
        ranks.prepare(model)
        self.compiled = compiled(model, config.compile, device)
        self.dense = adamw(model, config, device)
        self.values = LazyAdam(value_tables(model).values(), lr=config.value_lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(self, step):
        """One update; step counts from 0. Returns the mean loss over its micro-batches and the
        norm of the dense gradients, as tensors on the device: nothing waits for it."""
        config, total = self.config, 0.0
        for micro in self.micro_batches:
            seed = np.random.SeedSequence([config.seed, 3, step, micro]).generate_state(1)[0]
            torch.manual_seed(int(seed))  # dropout is a function of (seed, step, micro-batch)
            batch = to_device(self.batches.get(step, micro), self.device)
            with autocast(self.device, self.dtype):
                loss = self.compiled(**batch) * self.batches.share(step, micro)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        total = ranks.sum_gradients(self.model, total, len(self.micro_batches))

        self.scaler.unscale_(self.dense)
        parameters = [p for group in self.dense.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        for group in self.dense.param_groups:
            group["lr"] = learning_rate(step, config)
        scale = self.scaler.get_scale()
        self.scaler.step(self.dense)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # else it has found an inf, and skips the step
            self.values.step(grad_scale=scale)
        self.dense.zero_grad()
        self.values.zero_grad()
        return total, norm

    def train(self, out, state, log, due, signals):
        """The loop, from state["step"] on. due(step): the set of what is due after `step` steps:
        'log', 'save' and the caller's own tasks. If anything is, the loop yields (step, tasks),
        after logging and before saving. It ends at config.max_steps, or saves and ends once
        `signals` is not empty."""
        new, mark = [], time.perf_counter()  # new: (loss, norm) on the device, not looked at yet
        for step in range(state["step"] + 1, self.config.max_steps + 1):
            new.append(self.step(step - 1))
            stopped = ranks.signalled(signals)
            todo = due(step) | ({"save"} if stopped else set())
            if not todo:
                continue
            new = [(loss.item(), norm.item()) for loss, norm in new]  # waits for the device
            check_finite(step, new, self.config, self.dtype)
            state["seconds"] += time.perf_counter() - mark
            state["losses"] += [loss for loss, _ in new]
            state["step"] = step
            if "log" in todo:
                self.report(state, norm=new[-1][1], log=log)
            yield step, todo
            if "save" in todo:
                os.fsync(log.fileno())  # no checkpoint is newer than its log
                self.save(out, state)
            if stopped:
                return
            new, mark = [], time.perf_counter()

    def report(self, state, norm, log):
        """Write the record of the steps since the last one, and the line that a person watches."""
        step, steps, unit = state["step"], self.config.max_steps, self.batches.unit
        rate = len(state["losses"]) * self.batches.size / state["seconds"]
        state["elapsed"] += state["seconds"]
        record = {"step": step, "epoch": self.batches.epochs(step),
                  "loss": sum(state["losses"]) / len(state["losses"]),
                  "lr": learning_rate(step - 1, self.config), "grad_norm": norm,
                  f"{unit}_per_s": rate, "elapsed": state["elapsed"]}
        peak = peak_flops(self.device) if self.flops and self.dtype != torch.float32 else None
        if peak:
            record["mfu"] = rate * self.flops / (ranks.world() * peak)
        print(json.dumps(record), file=log)
        eta = timedelta(seconds=round((steps - step) * self.batches.size / rate))
        mfu = f" | mfu {record['mfu']:.1%}" if peak else ""
        print(f"step {step:,}/{steps:,} | epoch {record['epoch']:.2f} | loss {record['loss']:.4f}"
              f" | {rate:,.0f} {unit}/s{mfu} | lr {record['lr']:.2e} | eta {eta}", flush=True)
        state.update(losses=[], seconds=0.0)

    def save(self, out, state):
        state = {**state, "scaler": self.scaler.state_dict()}
        save_checkpoint(out, self.model, self.dense, self.values, state,
                        self.config.keep_checkpoints, self.labels)

    def restore(self, checkpoint):
        """Both optimizers and the scaler; the weights are loaded before. Returns the state."""
        state = load_optimizers(checkpoint, self.model, self.dense, self.values)
        self.scaler.load_state_dict(state.pop("scaler"))
        if ranks.total(state["step"]) != ranks.world() * state["step"]:
            raise Failure(f"{checkpoint}: other ranks see another one: is the folder shared?")
        print(f"going on from {checkpoint}")
        return state


def new_state(**more):
    """Where a run stands: steps done, seconds of training up to the last log record, and since then
    the seconds and each step's loss."""
    return {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": [], **more}


def to_device(batch, device):
    """{name: array} as {name: tensor} on the device."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if device.type == "cuda":
        return {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return {name: t.to(device) for name, t in tensors.items()}


def autocast(device, dtype):
    """torch.autocast, unless dtype is float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def compiled(model, choice, device):
    """torch.compile(model), or the model itself, as `choice` ('on', 'off', 'auto') says. In the
    default mode: a replayed CUDA graph (mode="reduce-overhead") would store no reads."""
    on = {"on": True, "off": False, "auto": device.type == "cuda"}.get(choice)
    if on is None:
        raise UserError(f"compile = {choice!r}: expected auto, on or off")
    if on and value_tables(model) and torch.__version__ < "2.13":
        raise UserError(f"compile = {choice!r}: to train a compiled memory takes torch 2.13 or "
                        f"later, this is {torch.__version__}: --compile=off")
    return torch.compile(model) if on else model


def learning_rate(step, config):
    """Linear warm-up over warmup_steps, then linear decay to 0 at max_steps; step counts from 0."""
    decay = (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
    return config.lr * min((step + 1) / max(1, config.warmup_steps), decay, 1.0)


def optimizer_groups(model, weight_decay):
    """Parameter groups for AdamW, without the value tables: no decay on biases, norms and memories
    (our reading: XLM trained its memory without)."""
    tables = {id(table.weight) for table in value_tables(model).values()}
    decayed, others = [], []
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in tables:
            (others if p.dim() <= 1 or ".memory." in name else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0}]


def adamw(model, config, device):
    """AdamW of everything but the value tables; config: has lr and weight_decay."""
    return torch.optim.AdamW(optimizer_groups(model, config.weight_decay), lr=config.lr,
                             betas=(0.9, 0.999), eps=1e-6, fused=device.type in ("cpu", "cuda"))


def check_finite(step, losses, config, dtype):
    """Stop at the first step whose loss or gradient norm is not finite (in float16 the scaler skips
    a step with such a norm). losses: (loss, gradient norm) of the steps up to `step`."""
    before = "none"
    for n, (loss, norm) in enumerate(losses, step - len(losses) + 1):
        if not (math.isfinite(loss) and (math.isfinite(norm) or dtype == torch.float16)):
            cause = "float16 overflowed, or " if dtype == torch.float16 else ""
            raise Failure(
                f"step {n}: the loss is {loss}, the gradient norm {norm}, before that {before}. "
                f"Likely cause: {cause}lr {learning_rate(n - 1, config):.1e} or value_lr "
                f"{config.value_lr:.1e} is too high, or the warm-up too short. Checkpoints are as "
                "they were: --init_from=RUN --out=out/NAME starts from the last one")
        before = f"{norm:.1e}"


# Dense bf16/fp16 tensor-core peaks, FLOP/s, of the SXM cards where there are several, from
# NVIDIA's data sheets.
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}


def peak_flops(device):
    """The peak of a CUDA device, or None where it is not known."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    names = re.findall(r"\w+", card)  # whole words: an L40 is no L4
    return next((peak for name, peak in PEAK_FLOPS.items() if name in names), None)


def flops_per_token(model, seq_len):
    """Floating-point operations of a training step per token, forward and backward: 6 for each
    weight that multiplies a token (sub-keys too), 12 * seq_len * d_model a layer for attention, the
    head at the predicted positions. Value reads move bytes; their few operations are left out."""
    config = model.bert.config
    weights = sum(p.numel() for name, p in model.bert.layers.named_parameters()
                  if p.dim() > 1 and not name.endswith("values.weight"))
    predicted = 1 if config.causal else MASKED  # share of the positions
    weights += predicted * config.d_model * (config.d_model + config.vocab_size)
    return 6 * weights + 12 * config.n_layer * seq_len * config.d_model


def open_log(out, last_step, tensorboard=False):
    """<out>/log.jsonl, one JSON object a line, without records newer than the checkpoint and
    without the last line if a killed process left half of it; `tensorboard`: see scalars.py."""
    if ranks.rank():
        return tempfile.TemporaryFile("w")  # the first one keeps the log
    path, kept = Path(out) / "log.jsonl", ""
    for file in path.parent.rglob(".tmp_*"):
        discard(file)  # what a killed process left behind
    if path.exists() and last_step:
        for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
            try:
                kept += f"{line}\n" if json.loads(line)["step"] <= last_step else ""
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}:{number}: not a record: remove the line") from None
    write_text(path, kept)
    log = path.open("a", buffering=1)
    return Scalars(log) if tensorboard else log


def write_settings(out, config, vocab, origin):
    """Begin a run's folder, or go on in it: config.json and the tokenizer's files. vocab: the
    vocab.txt of the corpus or initial model; origin: {"init_checkpoint": path or '', "first_step":
    steps that the initial model was trained for}."""
    for file in (vocab, vocab.with_name("tokenizer.json")):  # a run can be used without its corpus
        if file.exists():
            with atomic(out / file.name) as temporary:
                shutil.copyfile(file, temporary)
    settings = {**asdict(config), **origin, "tokenizer_hash": vocab_hash(read_vocab(vocab))}
    write_text(out / "config.json", json.dumps(settings, indent=1))


def read_settings(run, needed=()):
    """config.json of a run: its resolved settings, and where it started. UserError where it lacks
    one of the `needed`, as a fine-tuned run does those of pretraining."""
    try:
        settings = json.loads((Path(run) / "config.json").read_text())
        if not {"tokenizer_hash", "init_checkpoint", "first_step"} <= settings.keys():
            raise ValueError("not pretrain.py's")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run}/config.json: not readable ({error}): is {run} a run?") from None
    if lacking := [key for key in needed if key not in settings]:
        raise UserError(f"{run}: a fine-tuned run has no {lacking[0]}: expected one of pretraining")
    return settings


# Settings that have no effect on results: a run that is resumed may have other values of these.
NO_EFFECT = {"out", "log_interval", "checkpoint_interval", "device", "compile", "tensorboard",
             "rank_timeout"}


def check_same_run(config, run, may_change):
    """Refuse to continue a run under settings (a dataclass) that make it another one; say which of
    those that may change did. may_change: which may, besides NO_EFFECT."""
    before = {"objective": "masked", **read_settings(run)}  # older runs do not say it
    now = json.loads(json.dumps(asdict(config)))
    for key in sorted(key for key in now if key in before and now[key] != before[key]):
        if key not in NO_EFFECT | may_change:
            raise UserError(f"{run} was trained with {key} = {before[key]!r}, not "
                            f"{now[key]!r}: give the changed run its own --out=out/NAME")
        if key not in ("dry_run", "eval_only"):
            note = ", where the learning rate reaches 0" if key == "max_steps" else ""
            note += ": it rises again now" if note and now[key] > before[key] else ""
            print(f"{key} was {before[key]!r}, is now {now[key]!r}{note}")
