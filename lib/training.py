"""
Make a training step, and offer what else the loops in pretrain.py and finetune.py share.

>>> net, optimizers, state = prepare(model, settings)
>>> for number in range(state["step"], settings.max_steps):
...     set_rate(optimizers, settings, number)
...     loss, norm = step(number, net, batches, optimizers, settings)

batches.get(number, micro) returns a micro-batch of step `number` and its share of the step's loss:
(arguments of the model as arrays by name, weight). Several ranks deal the micro-batches out.
"""
import copy
import math
import os
import re
import signal
import time
from collections import namedtuple
from datetime import timedelta

import numpy as np
import torch
import torch.nn.functional as F

from lib import ranks
from lib.corpus import DROPOUT, MASKED
from lib.device import autocast, to_device, wants_compile
from lib.files import load_file
from lib.run import read_state
from lib.settings import Failure
from lib.usage import count_reads, usage_metrics
from lib.weights import model_file
from model import value_tables
from pkm import LazyAdam, MaskedBatchNorm

# Dense bf16/fp16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (for the SXM cards)
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}

# AdamW of the dense weights, LazyAdam of the value tables, and a GradScaler for float16
Optimizers = namedtuple("Optimizers", "dense sparse scaler")


def prepare(model, settings, checkpoint=None):
    """Make what trains a model: a new training, or the one that a checkpoint holds.

    settings: device and dtype are resolved, as set_up_device() returns them. Moves the model to its
    device. Returns (net, optimizers, state). net is the model, compiled if that is set, and under
    torchrun in DistributedDataParallel. state has the updates that are done (`step`) and what the
    next record of the log needs.
    """
    device = torch.device(settings.device)
    net = model.to(device)
    if wants_compile(settings.compile, device):
        torch.compiler.reset()  # torch limits recompilations; those of earlier models would count
        # not with mode="reduce-overhead": a replayed CUDA graph keeps no reads of the memory
        net = torch.compile(model)
    net = ranks.data_parallel(net)
    optimizers = make_optimizers(model, settings)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": []}
    if checkpoint:
        state = restore(checkpoint, optimizers)
        if state["step"] < settings.max_steps:
            print(f"going on from {checkpoint}")
    return net, optimizers, state


def make_optimizers(model, settings):
    """Make the Optimizers of a model, for all that learns.

    settings: has lr, keys_lr, value_lr and weight_decay. Biases, norms and memories have no weight
    decay (our reading: XLM trained its memory without). A group's rate is the schedule's times
    lr_factor: keys_lr for sub-keys, 1 for all others.
    """
    device = torch.device(settings.device)
    decayed = {"params": [], "weight_decay": settings.weight_decay, "lr_factor": 1.0}
    plain = {"params": [], "weight_decay": 0.0, "lr_factor": 1.0}
    keys = {"params": [], "weight_decay": 0.0, "lr_factor": settings.keys_lr}
    for name, p in model.named_parameters():
        group = decayed
        if name.endswith(".memory.keys") and settings.keys_lr != 1:
            group = keys
        elif p.dim() <= 1 or ".memory." in name:
            group = plain
        if p.requires_grad:
            group["params"].append(p)
    groups = [group for group in (decayed, plain, keys) if group["params"]]
    # betas and eps: Devlin et al.'s (our reading)
    dense = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.999), eps=1e-6,
                              fused=device.type in ("cpu", "cuda"))
    tables = [table for table in value_tables(model).values() if table.learns]
    sparse = LazyAdam(tables, lr=settings.value_lr)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.dtype == "float16")
    return Optimizers(dense, sparse, scaler)


def step(number, net, batches, optimizers, settings):
    """Make update `number`, counted from 0. Returns its loss and gradient norm, on the device.

    The loss is the mean over the step's micro-batches, by their weights. The norm is that of the
    dense gradients before they are clipped. After an overflow of float16 no weight moves.
    """
    dense, sparse, scaler = optimizers
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    mine = range(ranks.get_rank(), settings.accumulation, ranks.get_world_size())
    batch_norms = shared_norms(net)
    before, parts = take_statistics(batch_norms), []  # now 0: a micro-batch adds its own share
    loss = 0.0
    for micro in mine:
        seed_dropout(settings.seed, number, micro)
        batch, weight = batches.get(number, micro)
        if ranks.under_torchrun():
            net.require_backward_grad_sync = micro == mine[-1]  # ranks sum their gradients once
        with autocast(device, dtype):
            part = net(**to_device(batch, device)) * weight
        scaler.scale(part).backward()
        loss += part.detach()
        parts.append(take_statistics(batch_norms))
    replay_statistics(batch_norms, before, parts)

    scaler.unscale_(dense)
    parameters = [p for group in dense.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip or math.inf)
    # LazyAdam takes the mean over the ranks, but each rank's loss is a part of a sum
    sparse.step_with(dense, scaler, grad_scale=1 / ranks.get_world_size())
    dense.zero_grad()
    sparse.zero_grad()
    return ranks.all_reduce(loss), norm


def shared_norms(net):
    """List the batch norms that learn on several ranks. In one process there are none."""
    modules = net.modules() if ranks.get_world_size() > 1 else ()
    return [module for module in modules if isinstance(module, MaskedBatchNorm) and module.training]


@torch.no_grad()
def take_statistics(batch_norms):
    """Take each batch norm's running mean, variance and count, and set them to 0."""
    taken = [[buffer.clone() for buffer in norm.buffers()] for norm in batch_norms]
    for norm in batch_norms:
        for buffer in norm.buffers():
            buffer.zero_()
    return taken


@torch.no_grad()
def replay_statistics(batch_norms, before, parts):
    """Make the running statistics those of one process that saw all ranks' micro-batches in order.

    before: the statistics at the step's beginning. parts: what each micro-batch of this rank added
    to 0. A micro-batch without two real tokens has a count of 0, and changes nothing.
    """
    for n, norm in enumerate(batch_norms):
        mean, var, count = before[n]
        own = [torch.stack(kind) for kind in zip(*(part[n] for part in parts), strict=True)]
        # the first micro-batch of each rank, then the second of each, and so on
        everyone = [torch.stack(ranks.all_gather(kind), 1).flatten(0, 1) for kind in own]
        for new_mean, new_var, counts in zip(*everyone, strict=True):
            keep = 1 - norm.momentum * counts.to(mean.dtype)
            mean = mean * keep + new_mean
            var = var * keep + new_var
            count = count + counts
        for buffer, value in zip(norm.buffers(), (mean, var, count), strict=True):
            buffer.copy_(value)


def is_due(step, every, settings):
    """Tell whether something is due after `step` updates: at the end, and every so often."""
    return step == settings.max_steps or step % every == 0


def learning_rate(settings, step):
    """Return an update's rate: linear warm-up to lr, then linear decay to 0. step: from 0."""
    warm_up = (step + 1) / max(1, settings.warmup_steps)
    decay = (settings.max_steps - step) / max(1, settings.max_steps - settings.warmup_steps)
    return settings.lr * min(warm_up, decay, 1.0)


def set_rate(optimizers, settings, step):
    """Set the learning rate of AdamW's groups for an update."""
    rate = learning_rate(settings, step)
    for group in optimizers.dense.param_groups:
        group["lr"] = rate * group["lr_factor"]


def seed_dropout(seed, step, micro):
    """Seed torch for a micro-batch. A resumed run and any number of ranks draw the same."""
    stream = np.random.SeedSequence([seed, DROPOUT, step, micro])
    torch.manual_seed(int(stream.generate_state(1)[0]))


def take_stock(recent, state, settings, step, start):
    """Add the updates since the last record to the state, and wait for the device.

    recent: what step() returned for the updates up to number `step`, counted from 1. start: when
    they began. Returns the last norm. Failure if a loss or norm is not finite. In float16 the norm
    may be infinite: the scaler leaves out such an update.
    """
    recent = [(loss.item(), norm.item()) for loss, norm in recent]
    for n, (loss, norm) in enumerate(recent, step - len(recent) + 1):
        if not math.isfinite(loss) or (settings.dtype != "float16" and not math.isfinite(norm)):
            raise Failure(f"step {n}: the loss is {loss}, the gradient norm {norm}: lr or value_lr "
                          "is too high, or the warm-up too short (--init_from=RUN starts from the "
                          "last checkpoint)")
    state["step"] = step
    state["seconds"] += time.perf_counter() - start
    state["losses"] += [loss for loss, _ in recent]
    return recent[-1][1]


def log_training(run, state, settings, batches, norm, peak_share=None):
    """Log the updates since the last record, and print the line that a person watches.

    state: `losses` and `seconds` since the last record, which begin anew, and `elapsed` in all.
    batches: says what a step has, in `size` and `unit`. peak_share: see share_of_peak().
    """
    step = state["step"]
    speed = len(state["losses"]) * batches.size / state["seconds"]
    state["elapsed"] += state["seconds"]
    record = {"kind": "train", "step": step, "epoch": batches.epochs(step),
              "loss": sum(state["losses"]) / len(state["losses"]),
              "lr": learning_rate(settings, step - 1), "grad_norm": norm,
              f"{batches.unit}_per_s": speed, "elapsed": state["elapsed"]}
    state["losses"], state["seconds"] = [], 0.0
    mfu = ""
    if peak_share:
        record["mfu"] = speed * peak_share
        mfu = f" | mfu {record['mfu']:.1%}"
    run.log(record)
    eta = duration((settings.max_steps - step) * batches.size / speed)
    print(f"step {step:,}/{settings.max_steps:,} | epoch {record['epoch']:.2f} | "
          f"loss {record['loss']:.4f} | {speed:,.0f} {batches.unit}/s{mfu} | "
          f"lr {record['lr']:.2e} | eta {eta}", flush=True)


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Measure perplexity and slot usage on batches of masked_heldout or causal_heldout.

    Returns (results, the counts of count_reads). results: loss (nats), perplexity and accuracy over
    all predicted positions; predicted_tokens, their number; layers, {layer: usage_metrics}.
    """
    was_training = model.training
    model.eval()
    sums = np.zeros(3)  # of the loss, of correct predictions, of predictions
    with count_reads(value_tables(model), ranks.sum_over_ranks) as counts:
        for batch in ranks.deal_batches(batches):
            batch = to_device(batch, device)
            labels = batch.pop("labels").flatten()
            with autocast(device, dtype):
                logits = model(**batch)
            logits = logits.flatten(0, 1).float()
            sums += [F.cross_entropy(logits, labels, reduction="sum").item(),
                     (logits.argmax(1) == labels).sum().item(),
                     (labels != -100).sum().item()]
    model.train(was_training)
    loss, correct, predicted = ranks.sum_over_ranks(sums).tolist()
    results = {"loss": loss / predicted,
               "perplexity": math.exp(min(loss / predicted, 700)),  # above, it is no float
               "accuracy": correct / predicted,
               "predicted_tokens": int(predicted),
               "layers": {n: usage_metrics(**sums) for n, sums in counts.items()}}
    return results, counts


def checkpoint_files(model, labels, optimizers, state):
    """Return the content of a checkpoint's files by name: model, both optimizers, state."""
    dense, sparse, scaler = optimizers
    return {"model": model_file(model, labels),
            "optimizer": {"dense": dense.state_dict(), "sparse": sparse.state_dict()},
            "state": {**state, "scaler": scaler.state_dict()}}


def restore(checkpoint, optimizers):
    """Load the Optimizers' states from a checkpoint. Returns the state of the training."""
    dense, sparse, scaler = optimizers
    moments = copy.deepcopy(load_file(checkpoint / "optimizer.pt"))  # in memory, not mapped
    for group in moments["dense"]["param_groups"]:
        group["fused"] = dense.defaults["fused"]  # this device's, not that of the saved run
    dense.load_state_dict(moments["dense"])
    sparse.load_state_dict(moments["sparse"])
    state = read_state(checkpoint)
    scaler.load_state_dict(state.pop("scaler"))
    return state


def catch_signals():
    """Return a list to which SIGINT and SIGTERM are added from now on."""
    def on_signal(number, frame):
        signals.append(number)
        if not ranks.under_torchrun():  # there a Ctrl-C reaches each rank twice
            os.write(1, b"\nfinishing the step, then saving; "
                        b"Ctrl-C quits at once without saving\n")
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    signals = []
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, on_signal)
    return signals


def status_after(signals):
    """Return the exit status of a run that a signal stopped: 128 + the signal."""
    # torchrun would restart ranks that fail
    return 0 if ranks.under_torchrun() else 128 + signals[0]


def flops_per_token(model, seq_len):
    """Count the floating-point operations of a training step per token, forward and backward.

    A weight that multiplies a token has 6, sub-keys too; the head only at predicted positions.
    Attention has 12 * seq_len * d_model a layer. The few operations of value reads do not count.
    """
    config = model.bert.config
    weights = sum(p.numel() for name, p in model.bert.layers.named_parameters()
                  if p.dim() > 1 and not name.endswith("values.weight"))
    predicted = 1 if config.causal else MASKED  # share of the positions
    weights += predicted * config.d_model * (config.d_model + config.vocab_size)
    return 6 * weights + 12 * config.n_layer * seq_len * config.d_model


def share_of_peak(model, settings):
    """Return the share of all ranks' peak that one token per second takes; None if unknown."""
    device = torch.device(settings.device)
    if device.type != "cuda" or settings.dtype == "float32":
        return None
    words = re.findall(r"\w+", torch.cuda.get_device_name(device))  # an L40 is no L4
    for card, peak in PEAK_FLOPS.items():
        if card in words:
            return flops_per_token(model, settings.seq_len) / (ranks.get_world_size() * peak)
    return None


def count_parameters(model):
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def duration(seconds):
    """Format seconds as days, hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
