"""
Train a model: one update, and the loop that pretrain.py and finetune.py share.
"""
import math
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import numpy as np
import torch

from lib.common.errors import Failure, UserError
from lib.common.random_streams import DROPOUT
from lib.common.torchrun import under_torchrun
from lib.distributed.gradients import prepare_batch_norms, sum_gradients
from lib.distributed.processes import (
    any_signalled,
    get_world_size,
    my_micro_batches,
    sum_over_ranks,
)
from lib.training.flops import peak_flops
from lib.weights.checkpoint import checkpoint_files, load_optimizers
from model import value_tables
from pkm import LazyAdam


@dataclass
class Schedule:
    """The learning rate: linear warm-up to `lr`, then linear decay to 0 at max_steps."""

    lr: float
    warmup_steps: int
    max_steps: int

    def learning_rate(self, step):
        """Return the rate of an update; step counts from 0."""
        decay = (self.max_steps - step) / max(1, self.max_steps - self.warmup_steps)
        return self.lr * min((step + 1) / max(1, self.warmup_steps), decay, 1.0)


@dataclass
class State:
    """Where a run stands. A checkpoint has it as a dict."""

    step: int = 0  # updates that were made
    elapsed: float = 0.0  # seconds of training up to the last log record
    seconds: float = 0.0  # seconds of training since that record
    losses: list = field(default_factory=list)  # of each step since that record
    best: dict | None = None  # fine-tuning: the best epoch, and its metrics
    last: dict | None = None  # fine-tuning: the last epoch, and its metrics


class Trainer:
    """Train a model.

    config: has seed, keys_lr, value_lr, weight_decay, grad_clip and compile.
    batches: batches.get(step, micro) is a micro-batch, arrays by the name of the model's argument.
    A step has batches.accumulation micro-batches, together batches.size `batches.unit` (tokens or
    examples). batches.share(step, micro) is the weight of a micro-batch's loss in the step's mean.
    flops: operations of a training step per unit, for the log's mfu, or None.
    labels: names of a Classifier's classes, for its checkpoints. keep: how many checkpoints stay.
    """

    def __init__(self, config, schedule, model, batches, device, dtype, flops=None, labels=(),
                 keep=1):
        self.config, self.schedule, self.batches = config, schedule, batches
        self.flops, self.labels, self.keep = flops, labels, keep
        self.model, self.device, self.dtype = model.to(device), device, dtype
        self.micro_batches = my_micro_batches(batches.accumulation)
        prepare_batch_norms(model)
        self.compiled = compile_model(model, config.compile, device)
        groups = optimizer_groups(model, config.weight_decay, config.keys_lr)
        self.dense = torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, 0.999), eps=1e-6,
                                       fused=device.type in ("cpu", "cuda"))
        self.values = LazyAdam(value_tables(model).values(), lr=config.value_lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(self, step):
        """Make one update; step counts from 0.

        Returns the mean loss over the micro-batches and the norm of the dense gradients, as tensors
        on the device: nothing waits for it.
        """
        total = 0.0
        for micro in self.micro_batches:
            stream = np.random.SeedSequence([self.config.seed, DROPOUT, step, micro])
            torch.manual_seed(int(stream.generate_state(1)[0]))
            batch = to_device(self.batches.get(step, micro), self.device)
            with autocast(self.device, self.dtype):
                loss = self.compiled(**batch) * self.batches.share(step, micro)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        total = sum_gradients(self.model, total, len(self.micro_batches))

        self.scaler.unscale_(self.dense)
        parameters = [p for group in self.dense.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
        for group in self.dense.param_groups:
            group["lr"] = self.schedule.learning_rate(step) * group["lr_factor"]
        scale = self.scaler.get_scale()
        self.scaler.step(self.dense)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # a lower scale: it found an inf and skipped the step
            self.values.step(grad_scale=scale)
        self.dense.zero_grad()
        self.values.zero_grad()
        return total, norm

    def train(self, run, state, due, evaluate, signals):
        """Make the updates that are left, and after each of them what is due.

        run: a Run that is open. state: a State, which is updated. due(step): what is due after
        `step` updates, a set of 'log', 'evaluate' and 'save'. evaluate(step) may change the state.
        signals: see catch_signals; the run is saved and ends when one has come.
        """
        new, start = [], time.perf_counter()  # new: (loss, norm), still on the device
        while state.step < self.schedule.max_steps:
            new.append(self.step(state.step))
            state.step += 1
            stopped = any_signalled(signals)
            todo = due(state.step) | ({"save"} if stopped else set())
            if not todo:
                continue
            new = [(loss.item(), norm.item()) for loss, norm in new]  # waits for the device
            self.check_finite(state.step, new)
            state.seconds += time.perf_counter() - start
            state.losses += [loss for loss, _ in new]
            if "log" in todo:
                self.log(run, state, norm=new[-1][1])
            if "evaluate" in todo:
                evaluate(state.step)
            if "save" in todo:
                self.save(run, state)
            if stopped:
                return
            new, start = [], time.perf_counter()

    def log(self, run, state, norm):
        """Log the steps since the last record, and print the line that a person watches."""
        step, steps, unit = state.step, self.schedule.max_steps, self.batches.unit
        rate = len(state.losses) * self.batches.size / state.seconds
        state.elapsed += state.seconds
        record = {"step": step, "epoch": self.batches.epochs(step),
                  "loss": sum(state.losses) / len(state.losses),
                  "lr": self.schedule.learning_rate(step - 1), "grad_norm": norm,
                  f"{unit}_per_s": rate, "elapsed": state.elapsed}
        state.losses, state.seconds = [], 0.0
        peak = peak_flops(self.device) if self.flops and self.dtype != torch.float32 else None
        if peak:
            record["mfu"] = rate * self.flops / (get_world_size() * peak)
        run.log(record)
        eta = timedelta(seconds=round((steps - step) * self.batches.size / rate))
        mfu = f" | mfu {record['mfu']:.1%}" if peak else ""
        print(f"step {step:,}/{steps:,} | epoch {record['epoch']:.2f} | loss {record['loss']:.4f}"
              f" | {rate:,.0f} {unit}/s{mfu} | lr {record['lr']:.2e} | eta {eta}", flush=True)

    def check_finite(self, step, losses):
        """Raise Failure at the first step whose loss or gradient norm is not finite.

        losses: (loss, gradient norm) of the steps up to `step`. In float16 only the loss counts:
        the scaler skips a step whose norm is not finite.
        """
        half, before = self.dtype == torch.float16, "none"
        for n, (loss, norm) in enumerate(losses, step - len(losses) + 1):
            if not (math.isfinite(loss) and (math.isfinite(norm) or half)):
                cause = "float16 overflowed, or " if half else ""
                raise Failure(
                    f"step {n}: the loss is {loss}, the gradient norm {norm}, before that {before}."
                    f" Likely cause: {cause}lr {self.schedule.learning_rate(n - 1):.1e} or "
                    f"value_lr {self.config.value_lr:.1e} is too high, or the warm-up too short. "
                    "Checkpoints are as they were: --init_from=RUN --out=out/NAME starts from the "
                    "last one")
            before = f"{norm:.1e}"

    def save(self, run, state):
        """Save a checkpoint of the model, both optimizers, the state and the scaler."""
        saved = {**asdict(state), "scaler": self.scaler.state_dict()}
        files = checkpoint_files(self.model, self.dense, self.values, saved, self.labels)
        best_epoch = state.best["epoch"] if state.best else None
        run.save_checkpoint(state.step, files, self.keep, best_epoch)

    def restore(self, checkpoint):
        """Load both optimizers and the scaler, but not the weights. Returns the State."""
        saved = load_optimizers(checkpoint, self.dense, self.values)
        self.scaler.load_state_dict(saved.pop("scaler"))
        if sum_over_ranks(saved["step"]) != get_world_size() * saved["step"]:
            raise Failure(f"{checkpoint}: other ranks see another one: is the folder shared?")
        print(f"going on from {checkpoint}")
        return State(**saved)


def optimizer_groups(model, weight_decay, keys_lr=1.0):
    """Return AdamW's parameter groups: all parameters but the value tables.

    Biases, norms and memories have no weight decay (our reading: XLM trained its memory without).
    A group's learning rate is its lr_factor times the schedule's. keys_lr is the factor of the
    memory's sub-keys.
    """
    tables = {id(table.weight) for table in value_tables(model).values()}
    decayed, others, keys = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad or id(p) in tables:
            continue
        if name.endswith(".memory.keys") and keys_lr != 1:
            keys.append(p)
        else:
            (others if p.dim() <= 1 or ".memory." in name else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay, "lr_factor": 1.0},
              {"params": others, "weight_decay": 0.0, "lr_factor": 1.0}]
    return groups + [{"params": keys, "weight_decay": 0.0, "lr_factor": keys_lr}] * bool(keys)


def to_device(batch, device):
    """Turn {name: array} into {name: tensor} on the device."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if device.type == "cuda":
        return {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return {name: t.to(device) for name, t in tensors.items()}


def autocast(device, dtype):
    """Return torch.autocast, which does nothing if dtype is float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def compile_model(model, choice, device):
    """Return torch.compile(model), or the model itself. choice: 'on', 'off' or 'auto'.

    The mode is the default one. A CUDA graph (mode="reduce-overhead") would be replayed without
    storing what the memory reads.
    """
    on = {"on": True, "off": False, "auto": device.type == "cuda"}[choice]
    if on and value_tables(model) and torch.__version__ < "2.13":
        raise UserError(f"compile = {choice!r}: to train a compiled memory takes torch 2.13 or "
                        f"later, this is {torch.__version__}: --compile=off")
    return torch.compile(model) if on else model


def catch_signals():
    """Return a list that SIGINT and SIGTERM are put into from now on, for the loop to see.

    A second signal ends the process at once. Under torchrun it does not: there a Ctrl-C reaches
    each rank twice, from the terminal and from torchrun.
    """
    def on_signal(number, frame):
        signals.append(number)
        if not under_torchrun():
            os.write(1, b"\nfinishing the step, then saving; once more quits at once, unsaved\n")
            for caught in both:
                signal.signal(caught, signal.SIG_DFL)

    signals, both = [], (signal.SIGINT, signal.SIGTERM)
    for caught in both:
        signal.signal(caught, on_signal)
    return signals
