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
import signal
import time
from datetime import timedelta

import numpy as np
import torch

from lib.common.errors import Failure, UserError
from lib.common.torchrun import under_torchrun
from lib.corpus.batches import MASKED
from lib.distributed.gradients import distribute, sum_gradients
from lib.distributed.processes import (
    any_signalled,
    get_world_size,
    my_micro_batches,
    sum_over_ranks,
)
from lib.weights.checkpoint import load_optimizers, save_checkpoint
from model import value_tables
from pkm import LazyAdam


def catch_signals():
    """From now on SIGINT and SIGTERM are put into the returned list, for the loop to see; a second
    one ends the process at once (not under torchrun: there a Ctrl-C reaches a rank twice)."""
    def on_signal(number, frame):
        signals.append(number)
        if under_torchrun():  # which passes on what a terminal has already sent to all
            return
        os.write(1, b"\nfinishing the step, then saving; once more quits at once, unsaved\n")
        for each in both:
            signal.signal(each, signal.SIG_DFL)

    signals, both = [], (signal.SIGINT, signal.SIGTERM)
    for each in both:
        signal.signal(each, on_signal)
    return signals


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
        self.micro_batches = my_micro_batches(batches.accumulation)
        distribute(model)
        self.model, self.device, self.dtype = model.to(device), device, dtype
        self.compiled = compile_model(model, config.compile, device)
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
        total = sum_gradients(self.model, total, len(self.micro_batches))

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
            stopped = any_signalled(signals)
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
            record["mfu"] = rate * self.flops / (get_world_size() * peak)
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
        if sum_over_ranks(state["step"]) != get_world_size() * state["step"]:
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


def compile_model(model, choice, device):
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
