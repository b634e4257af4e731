"""
Train a model: one update, and the loop that pretrain.py and finetune.py share.
"""
import copy
import math
import os
import re
import signal
import time
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import torch

from lib.corpus import DROPOUT, MASKED
from lib.device import autocast, duration, to_device
from lib.distributed import (
    cut_moments,
    distribute,
    get_world_size,
    mark_moments,
    my_micro_batches,
    stop_or_save,
    sum_gradients,
    sum_over_ranks,
)
from lib.errors import Failure, UserError
from lib.files import load_file, under_torchrun
from lib.run import read_state
from lib.weights import model_file
from model import value_tables
from values import LazyAdam


@dataclass
class State:
    """Say where a run stands. A checkpoint has this as a dict."""

    step: int = 0  # how many updates were made
    elapsed: float = 0.0  # seconds of training, up to the last log record
    seconds: float = 0.0  # seconds of training since that record
    losses: list = field(default_factory=list)  # the loss of each step since that record
    best: dict | None = None  # fine-tuning: `epoch` and metrics of the best epoch
    last: dict | None = None  # fine-tuning: `epoch` and metrics of the last epoch


class Trainer:
    """Train a model. `config` has the settings of optimization, seed, compile.

    `batches.get(step, micro)` returns a micro-batch: a dict of arrays by argument name of the
    model's forward().
    `batches.loss_weight(step, micro)` is its weight in the loss. A step has `batches.accumulation`
    micro-batches, together `batches.size` tokens or examples, as `batches.unit` says.
    `flops` are the operations of a training step per token, for the log's mfu. `labels` name a
    Classifier's classes, for its checkpoints. `keep` is the number of checkpoints that stay.
    """

    def __init__(self, config, model, batches, device, dtype, flops=None, labels=(), keep=1):
        self.config, self.batches = config, batches
        self.flops, self.labels, self.keep = flops, labels, keep
        self.micro_batches = my_micro_batches(batches.accumulation)
        distribute(model)
        self.model, self.device, self.dtype = model.to(device), device, dtype
        # not with mode="reduce-overhead": a replayed CUDA graph stores no reads of the memory
        on = config.compile == "on" or config.compile == "auto" and device.type == "cuda"
        self.compiled = torch.compile(model) if on else model
        groups = optimizer_groups(model, config.weight_decay, config.keys_lr)
        self.dense_optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.999), eps=1e-6,
                                                 fused=device.type in ("cpu", "cuda"))
        tables = [table for table in value_tables(model).values() if table.weight.requires_grad]
        self.value_optimizer = LazyAdam(tables, lr=config.value_lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def learning_rate(self, step):
        """Return an update's rate: linear warm-up to lr, then decay to 0; `step` counts from 0."""
        lr, warmup, last = self.config.lr, self.config.warmup_steps, self.config.max_steps
        return lr * min((step + 1) / max(1, warmup), (last - step) / max(1, last - warmup), 1.0)

    def step(self, step):
        """Make one update; `step` counts from 0. Returns the mean loss of the micro-batches and the
        norm of the dense gradients. Both stay on the device. In one process a step with a
        memory waits for a CUDA device once, in LazyAdam, in float16 twice more, for its scale."""
        total = 0.0
        for micro in self.micro_batches:
            # dropout depends on (seed, step, micro-batch) alone: a resumed run draws the same
            stream = np.random.SeedSequence([self.config.seed, DROPOUT, step, micro])
            torch.manual_seed(int(stream.generate_state(1)[0]))
            batch = to_device(self.batches.get(step, micro), self.device)
            with autocast(self.device, self.dtype):
                loss = self.compiled(**batch) * self.batches.loss_weight(step, micro)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        total = sum_gradients(self.model, total, len(self.micro_batches))

        self.scaler.unscale_(self.dense_optimizer)
        parameters = [p for group in self.dense_optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = self.learning_rate(step) * group["lr_factor"]
        scale = self.scaler.get_scale()
        self.scaler.step(self.dense_optimizer)
        self.scaler.update()
        # a lower scale means that gradients had an inf and the dense step was skipped
        if self.scaler.get_scale() >= scale:
            self.value_optimizer.step(grad_scale=scale)
        self.dense_optimizer.zero_grad()
        self.value_optimizer.zero_grad()
        return total, norm

    def train(self, run, state, due, evaluate, signals):
        """Train up to max_steps, or until a signal comes (see catch_signals). `run` is an open Run.
        `due(step)` is what to do after `step` updates: a set of 'log', 'evaluate' and 'save'.
        `evaluate(step)` may change the State, which is then saved."""
        new, start = [], time.perf_counter()  # new: (loss, norm), still on the device
        stopped, saved, wait = False, start, math.inf
        while state.step < self.config.max_steps and not stopped:
            new.append(self.step(state.step))
            state.step += 1
            # the ranks' clocks differ: all save as soon as one clock says that it is time
            stopped, late = stop_or_save(signals, time.perf_counter() - saved >= wait)
            todo = due(state.step) | ({"save"} if stopped or late else set())
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
                saved = time.perf_counter()
            new, start = [], time.perf_counter()

    def log(self, run, state, norm):
        """Log the steps since the last record, and print the line that a person watches."""
        step, steps, unit = state.step, self.config.max_steps, self.batches.unit
        rate = len(state.losses) * self.batches.size / state.seconds
        state.elapsed += state.seconds
        record = {"step": step, "epoch": self.batches.epochs(step),
                  "loss": sum(state.losses) / len(state.losses),
                  "lr": self.learning_rate(step - 1), "grad_norm": norm,
                  f"{unit}_per_s": rate, "elapsed": state.elapsed}
        state.losses, state.seconds = [], 0.0
        mfu = ""
        if self.flops and self.dtype != torch.float32 and (peak := peak_flops(self.device)):
            record["mfu"] = rate * self.flops / (get_world_size() * peak)
            mfu = f" | mfu {record['mfu']:.1%}"
        run.log(record)
        eta = duration((steps - step) * self.batches.size / rate)
        print(f"step {step:,}/{steps:,} | epoch {record['epoch']:.2f} | loss {record['loss']:.4f}"
              f" | {rate:,.0f} {unit}/s{mfu} | lr {record['lr']:.2e} | eta {eta}", flush=True)

    def check_finite(self, step, losses):
        """Raise Failure if a loss or gradient norm is not finite. losses: (loss, norm) of the steps
        up to `step`. In float16 the norm may be infinite: the scaler skips such a step."""
        for n, (loss, norm) in enumerate(losses, step - len(losses) + 1):
            checked = (loss,) if self.dtype == torch.float16 else (loss, norm)
            if not all(map(math.isfinite, checked)):
                raise Failure(
                    f"step {n}: the loss is {loss}, the gradient norm {norm}. Likely cause: lr "
                    f"{self.learning_rate(n - 1):.1e} or value_lr {self.config.value_lr} "
                    "is too high, or the warm-up too short. --init_from=RUN --out=out/NAME starts "
                    "from the last checkpoint")

    def checkpoint_files(self, state):
        """Return the content of a checkpoint's files by name: the model, both optimizers' moments,
        the state with the scaler."""
        values = mark_moments(self.value_optimizer.state_dict())
        return {"model": model_file(self.model, self.labels),
                "optimizer": {"dense": self.dense_optimizer.state_dict(), "values": values},
                "state": {**asdict(state), "scaler": self.scaler.state_dict()}}

    def save(self, run, state):
        """Save a checkpoint."""
        best_epoch = state.best and state.best["epoch"]
        run.save_checkpoint(state.step, self.checkpoint_files(state), self.keep, best_epoch)

    def restore(self, checkpoint):
        """Load both optimizers and the scaler, but not the weights. Returns the State."""
        if not (checkpoint / "optimizer.pt").is_file():
            raise UserError(f"{checkpoint}: no optimizer.pt, as in a pruned run, whose training "
                            "cannot go on: start another run with --init_from")
        moments = load_file(checkpoint / "optimizer.pt", mmap=True)
        try:
            dense = copy.deepcopy(moments["dense"])  # in memory, not mapped from the file
            for group in dense["param_groups"]:  # this device's, not that of the saved run
                group["fused"] = self.dense_optimizer.defaults["fused"]
            self.dense_optimizer.load_state_dict(dense)
            self.value_optimizer.load_state_dict(cut_moments(moments["values"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{checkpoint}/optimizer.pt does not belong to the model.pt beside it "
                            f"({error})") from None
        saved = read_state(checkpoint)
        try:
            self.scaler.load_state_dict(saved.pop("scaler"))
            state = State(**saved)
            for kept in fields(state):
                if not isinstance(getattr(state, kept.name), kept.type):
                    raise TypeError(f"{kept.name} = {getattr(state, kept.name)!r}")
            sum([*(state.best or {}).values(), *(state.last or {}).values()])  # raises: no numbers
            if checkpoint.name != f"step_{state.step:06d}":
                raise ValueError(f"step = {state.step}")
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise UserError(f"{checkpoint}/state.pt: damaged ({error}): remove its folder to use "
                            "an older checkpoint") from None
        if sum_over_ranks(saved["step"]) != get_world_size() * saved["step"]:
            raise Failure(f"{checkpoint}: other ranks see another one: is the folder shared?")
        print(f"going on from {checkpoint}")
        return state


def optimizer_groups(model, weight_decay, keys_lr=1.0):
    """Return AdamW's parameter groups: all parameters but the value tables. Biases, norms and
    memories have no weight decay (our reading: XLM trained its memory without). A group's
    rate is the schedule's times lr_factor: keys_lr for the memory's sub-keys, 1 for all others."""
    groups = {(weight_decay, 1.0): [], (0.0, 1.0): []}
    for name, p in model.named_parameters():
        if p.requires_grad and not name.endswith(".memory.values.weight"):
            decay = 0.0 if p.dim() <= 1 or ".memory." in name else weight_decay
            factor = keys_lr if name.endswith(".memory.keys") else 1.0
            groups.setdefault((decay, factor), []).append(p)
    return [{"params": parameters, "weight_decay": decay, "lr_factor": factor}
            for (decay, factor), parameters in groups.items() if parameters]


def catch_signals():
    """Return a list to which SIGINT, SIGTERM and SIGUSR1 are added from now on. A second Ctrl-C
    ends the process at once, except under torchrun, where a Ctrl-C reaches each rank twice."""
    def on_signal(number, frame):
        signals.append(number)
        if not under_torchrun():
            os.write(1, b"\nfinishing the step, then saving; "
                        b"Ctrl-C quits at once without saving\n")
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    signals = []
    for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(caught, on_signal)
    return signals


def status_after(signals):
    """Return the exit status of a run that a signal stopped, after it saved: 128 + the signal.
    Under torchrun it is 0, because torchrun would restart ranks that fail."""
    return 0 if under_torchrun() else 128 + signals[0]


# Dense bf16/fp16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (for the SXM cards)
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}


def peak_flops(device):
    """Return a CUDA device's peak in FLOP/s, or None if it is unknown."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    names = re.findall(r"\w+", card)  # whole words: an L40 is no L4
    return next((peak for name, peak in PEAK_FLOPS.items() if name in names), None)


def flops_per_token(model, seq_len):
    """Count the floating-point operations of a training step per token, forward and backward. A
    weight that multiplies a token has 6, sub-keys too; the head only at predicted positions.
    Attention has 12 * seq_len * d_model a layer. The few operations of value reads do not count."""
    config = model.bert.config
    weights = sum(p.numel() for name, p in model.bert.layers.named_parameters()
                  if p.dim() > 1 and not name.endswith("values.weight"))
    predicted = 1 if config.causal else MASKED  # share of the positions
    weights += predicted * config.d_model * (config.d_model + config.vocab_size)
    return 6 * weights + 12 * config.n_layer * seq_len * config.d_model


DRIFT, QUARTER = 1 / 3, 1 / 4


def find_warnings(evaluations, max_steps, initialized):
    """Find what is wrong at the last evaluation: {subject: one line}.

    evaluations: the log's records of evaluations, of all steps so far. initialized: whether the run
    began with a trained model. Its perplexity should be below its start after a quarter of the
    steps. No layer should drift. In a model that began at random usage can first fall and then
    return (results/causal.md): its first quarter does not count.
    """
    first, last = evaluations[0], evaluations[-1]
    found, step = {}, last["step"]
    late = after_a_quarter(evaluations, max_steps)
    if initialized and late and last["perplexity"] > first["perplexity"]:
        found["perplexity"] = (
            f"after {step:,} of {max_steps:,} steps the perplexity, {last['perplexity']:.2f}, is "
            f"still above the initial model's, {first['perplexity']:.2f}: it may fall with the "
            "rate; a lower lr undoes less of what was learned")
    counted = evaluations if initialized else late
    for layer, usage in last["layers"].items() if counted else ():
        fall, best = usage_fall(counted, layer)
        if fall >= DRIFT:
            found[f"layer {layer}"] = (
                f"top-1 usage of layer {layer} fell from {best['layers'][layer]['top1_mu']:.1%} at "
                f"step {best['step']:,} to {usage['top1_mu']:.1%} at step {step:,}: slots fall out "
                "of use; a lower keys_lr or lr keeps more of them")
    return found


def after_a_quarter(evaluations, max_steps, first_step=0):
    """List the evaluations after a quarter of the steps, which count from `first_step`."""
    return [e for e in evaluations if e["step"] - first_step >= QUARTER * max_steps]


def usage_fall(evaluations, layer):
    """Compare a layer's last top-1 usage with its best. Returns (share of the best that was lost,
    evaluation of the best)."""
    best = max(evaluations, key=lambda e: e["layers"][layer]["top1_mu"])
    last = evaluations[-1]
    return 1 - last["layers"][layer]["top1_mu"] / best["layers"][layer]["top1_mu"], best


def warn(run, max_steps):
    """Print and log the warnings of an open run's last evaluation, each subject once."""
    if not run.log_file:
        return  # only the first rank writes
    records = run.records()
    evaluations = [record for record in records if "perplexity" in record]
    known = {record["about"] for record in records if "warning" in record}
    initialized = bool(run.settings()["init_checkpoint"])
    for about, line in find_warnings(evaluations, max_steps, initialized).items():
        if about not in known:
            print(f"warning: {line}", flush=True)
            run.log({"step": evaluations[-1]["step"], "warning": line, "about": about})
