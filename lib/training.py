"""Offer the parts of training and evaluation. The loops are in pretrain.py and finetune.py."""
import copy
import math
import os
import re
import signal
from datetime import timedelta

import numpy as np
import torch
import torch.nn.functional as F

from lib.corpus import DROPOUT, MASKED
from lib.device import autocast, to_device
from lib.files import load_file
from lib.ranks import deal_batches, get_world_size, sum_over_ranks, under_torchrun
from lib.run import read_state
from lib.settings import Failure
from lib.usage import count_reads, usage_metrics
from lib.weights import model_file
from model import value_tables
from pkm import LazyAdam

# Dense bf16/fp16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (for the SXM cards)
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}


def make_optimizers(model, config, device):
    """Make AdamW for dense parameters and LazyAdam for learning value tables.

    config: has lr, keys_lr, value_lr and weight_decay. Biases, norms and memories have no weight
    decay (our reading: XLM trained its memory without). A group's rate is the schedule's times
    lr_factor: keys_lr for sub-keys, 1 for all others. Returns both optimizers.
    """
    decayed = {"params": [], "weight_decay": config.weight_decay, "lr_factor": 1.0}
    plain = {"params": [], "weight_decay": 0.0, "lr_factor": 1.0}
    keys = {"params": [], "weight_decay": 0.0, "lr_factor": config.keys_lr}
    for name, p in model.named_parameters():
        group = decayed
        if name.endswith(".memory.keys") and config.keys_lr != 1:
            group = keys
        elif p.dim() <= 1 or ".memory." in name:
            group = plain
        if p.requires_grad:
            group["params"].append(p)
    groups = [group for group in (decayed, plain, keys) if group["params"]]
    # betas and eps: Devlin et al.'s (our reading)
    dense = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.999), eps=1e-6,
                              fused=device.type in ("cpu", "cuda"))
    tables = [table for table in value_tables(model).values() if table.learns]
    return dense, LazyAdam(tables, lr=config.value_lr)


def update(dense, sparse, scaler, grad_clip):
    """Update a model by its gradients, and drop them. Returns the norm of the dense ones.

    dense, sparse: of make_optimizers(). scaler: a GradScaler, which float16 enables. After an
    overflow no weight moves. grad_clip: the largest norm; 0: any.
    """
    scaler.unscale_(dense)
    parameters = [p for group in dense.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip or math.inf)
    sparse.step_with(dense, scaler)
    dense.zero_grad()
    sparse.zero_grad()
    return norm


def is_due(step, every, config):
    """Tell whether something is due after `step` updates: at the end, and every so often."""
    return step == config.max_steps or every > 0 and step % every == 0


def learning_rate(config, step):
    """Return an update's rate: linear warm-up to lr, then linear decay to 0. step: from 0."""
    warm_up = (step + 1) / max(1, config.warmup_steps)
    decay = (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
    return config.lr * min(warm_up, decay, 1.0)


def set_rate(dense, config, step):
    """Set the learning rate of AdamW's groups for an update."""
    rate = learning_rate(config, step)
    for group in dense.param_groups:
        group["lr"] = rate * group["lr_factor"]


def seed_dropout(seed, step, micro):
    """Seed torch for a micro-batch. A resumed run and any number of ranks draw the same."""
    stream = np.random.SeedSequence([seed, DROPOUT, step, micro])
    torch.manual_seed(int(stream.generate_state(1)[0]))


def check_finite(losses, config, step):
    """Raise Failure if a loss or gradient norm is not finite.

    losses: (loss, norm) of the updates up to number `step`, counted from 1. In float16 the norm
    may be infinite: the scaler leaves out such an update.
    """
    for n, (loss, norm) in enumerate(losses, step - len(losses) + 1):
        if not math.isfinite(loss) or (config.dtype != "float16" and not math.isfinite(norm)):
            raise Failure(
                f"step {n}: the loss is {loss}, the gradient norm {norm}. Likely cause: lr or "
                "value_lr is too high, or the warm-up too short. --init_from=RUN starts from the "
                "last checkpoint")


def log_training(run, state, config, batches, norm, peak_share=None):
    """Log the updates since the last record, and print the line that a person watches.

    state: `losses` and `seconds` since the last record, `elapsed` in all. batches: says what a step
    has, in `size` and `unit`. peak_share: see share_of_peak().
    """
    step = state["step"]
    rate = len(state["losses"]) * batches.size / state["seconds"]
    record = {"step": step, "epoch": batches.epochs(step),
              "loss": sum(state["losses"]) / len(state["losses"]),
              "lr": learning_rate(config, step - 1), "grad_norm": norm,
              f"{batches.unit}_per_s": rate, "elapsed": state["elapsed"]}
    mfu = ""
    if peak_share:
        record["mfu"] = rate * peak_share
        mfu = f" | mfu {record['mfu']:.1%}"
    run.log(record)
    eta = duration((config.max_steps - step) * batches.size / rate)
    print(f"step {step:,}/{config.max_steps:,} | epoch {record['epoch']:.2f} | "
          f"loss {record['loss']:.4f} | {rate:,.0f} {batches.unit}/s{mfu} | "
          f"lr {record['lr']:.2e} | eta {eta}", flush=True)


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Measure perplexity and slot usage on batches of masked_heldout or causal_heldout.

    Returns (results, the counts of count_reads). results: loss (nats), perplexity and accuracy over
    all predicted positions; masked_tokens, their number; layers, {layer: usage_metrics}.
    """
    was_training = model.training
    model.eval()
    loss = correct = masked = 0
    with count_reads(value_tables(model), sum_over_ranks) as counts:
        for batch in deal_batches(batches):
            batch = to_device(batch, device)
            labels = batch.pop("labels").flatten()
            with autocast(device, dtype):
                logits = model(**batch)
            logits = logits.flatten(0, 1).float()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            masked += (labels != -100).sum().item()
    model.train(was_training)
    loss, correct, masked = map(sum_over_ranks, (loss, correct, masked))
    results = {"loss": loss / masked,
               "perplexity": math.exp(min(loss / masked, 700)),  # above, it is no float
               "accuracy": correct / masked,
               "masked_tokens": masked,
               "layers": {n: usage_metrics(**sums) for n, sums in counts.items()}}
    return results, counts


def describe_evaluation(results):
    """Yield the results of evaluate_language_model as lines to print."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: top-1 MU {m['top1_mu']:.1%} (uniform use: "
               f"{m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, KL_w {m['kl_w']:.2f}, "
               f"{m['accesses']:,} accesses")


def checkpoint_files(model, labels, dense, sparse, scaler, state):
    """Return the content of a checkpoint's files by name: model, both optimizers, state."""
    moments = {"dense": dense.state_dict(), "values": sparse.state_dict()}
    if get_world_size() > 1:
        from lib import sharding

        moments["values"] = sharding.whole_moments(moments["values"])
    return {"model": model_file(model, labels), "optimizer": moments,
            "state": {**state, "scaler": scaler.state_dict()}}


def restore(checkpoint, dense, sparse, scaler):
    """Load both optimizers and the scaler. Returns the state of the run."""
    moments = load_file(checkpoint / "optimizer.pt")
    if get_world_size() > 1:
        from lib import sharding

        moments["values"] = sharding.cut_moments(moments["values"])
    moments = copy.deepcopy(moments)  # in memory, not mapped from the file
    for group in moments["dense"]["param_groups"]:
        group["fused"] = dense.defaults["fused"]  # this device's, not that of the saved run
    dense.load_state_dict(moments["dense"])
    sparse.load_state_dict(moments["values"])
    state = read_state(checkpoint)
    scaler.load_state_dict(state.pop("scaler"))
    print(f"going on from {checkpoint}")
    return state


def catch_signals():
    """Return a list to which SIGINT and SIGTERM are added from now on."""
    def on_signal(number, frame):
        signals.append(number)
        if not under_torchrun():  # there a Ctrl-C reaches each rank twice
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
    return 0 if under_torchrun() else 128 + signals[0]


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


def share_of_peak(model, seq_len, device, dtype):
    """Return the share of all ranks' peak that one token per second takes; None if unknown."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    words = re.findall(r"\w+", torch.cuda.get_device_name(device))  # an L40 is no L4
    for card, peak in PEAK_FLOPS.items():
        if card in words:
            return flops_per_token(model, seq_len) / (get_world_size() * peak)
    return None


def count_parameters(model):
    """Count the parameters of a model that is not yet distributed."""
    return sum(p.numel() for p in model.parameters())


def duration(seconds):
    """Format seconds as days, hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
