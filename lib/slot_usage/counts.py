"""
Memory usage: hooks see what the memories of a model read, and count it for the metrics of section
3.2; what a corpus reads, and in which contexts.

>>> with count_reads(model) as counts:
...     model(ids)
>>> usage_metrics(**counts[4])                      # of layer 4: MU, top-1 MU, KL_u, KL_w
"""
import contextlib
import functools
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

from lib.common.errors import UserError
from lib.distributed.processes import deal_batches, sum_over_ranks
from lib.training.trainer import autocast, to_device
from model import value_tables


@contextlib.contextmanager
def watch_reads(model, see):
    """Until the `with` block ends, call see(layer, slots, weights) at every lookup of the model's
    memories: (tokens, heads, topk) both, best first. Padded tokens are never looked up. Hooks are
    not called inside a compiled model: run the raw one."""
    def hook(layer, table, inputs, output):
        slots, weights = inputs[:2]
        see(layer, slots, weights)

    hooks = [table.register_forward_hook(functools.partial(hook, layer))
             for layer, table in value_tables(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@contextlib.contextmanager
def count_reads(model):
    """Count what every memory of a model reads: `with count_reads(model) as counts`. One access is
    one head's read for one token, our reading of the x of section 3.2.

    counts[layer] is a dict. `read` (how often a slot was among the top k), `top1` (how often it was
    the best) and `weight` (the sum of its softmax weights) are (n_slots,) arrays. `topk` is an int.
    `effective_k` is exp(entropy of an access's weights), summed over the accesses: 1 where one slot
    has all the weight, topk where all slots have the same.
    """
    counts = {}
    for layer, table in value_tables(model).items():
        device = table.weight.device
        device = "cpu" if device.type == "mps" else device  # MPS has no float64
        zeros = torch.zeros(len(table.weight), dtype=torch.int64, device=device)
        counts[layer] = {"read": zeros, "top1": zeros.clone(), "weight": zeros.double(),
                         "effective_k": zeros[0].double()}

    def count(layer, slots, weights):
        sums = counts[layer]
        device, n_slots = sums["read"].device, len(sums["read"])
        slots, weights = slots.to(device), weights.to(device)
        flat = slots.flatten()
        sums["read"] += flat.bincount(minlength=n_slots)
        sums["top1"] += slots[..., 0].flatten().bincount(minlength=n_slots)
        sums["weight"] += flat.bincount(weights.flatten().double(), minlength=n_slots)
        sums["effective_k"] += torch.special.entr(weights).sum(-1).exp().sum(dtype=torch.float64)
        sums["topk"] = slots.shape[-1]

    with watch_reads(model, count):
        yield counts
    for sums in counts.values():
        for name in ("read", "top1", "weight"):
            sums[name] = sum_over_ranks(sums[name].cpu().numpy())
        sums["effective_k"] = sum_over_ranks(sums["effective_k"].item())


def usage_metrics(read, top1, weight, topk, effective_k):
    """The metrics of section 3.2 from the counts of a layer (see count_reads): mu and top1_mu as
    shares of 1, kl_u and kl_w in nats. Also the number of accesses, the mean effective k of an
    access, and the mu and top1_mu of as many accesses to uniformly random slots."""
    n_slots, accesses = len(read), int(top1.sum())

    def kl_to_uniform(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        return float(math.log(n_slots) + (share * np.log(share)).sum())

    def uniform(k):
        return 1 - (1 - k / n_slots) ** accesses

    return {"mu": float((read > 0).mean()), "top1_mu": float((top1 > 0).mean()),
            "kl_u": kl_to_uniform(read), "kl_w": kl_to_uniform(weight),
            "effective_k": effective_k / accesses, "accesses": accesses,
            "mu_uniform": uniform(topk), "top1_mu_uniform": uniform(1)}


def class_distances(positive, negative):
    """Figure 4: how much the slots differ that two classes read. positive, negative: top-1 counts
    of two random halves of each class, (2, n_slots).

    kl_between: KL(p || 0.9 q + 0.1 p) in nats, where p and q are the slots' shares in a half of the
    positive and of the negative class; iou_between: the sum of the smaller shares over the sum of
    the larger ones. Means over the four pairs of halves. The 0.1 p keeps the KL finite, at most
    log 10, where only p reads a slot. One added to every count would, too, but it weighs more the
    larger the table is and the fewer the accesses are.

    kl_floor, iou_floor: the same between the two halves of one class, the noise floor: the fewer
    the accesses, the more two samples of one distribution differ.

    kl, iou: corrected for the floor. kl is scaled so that the floor becomes 0 and log 10 stays; iou
    is computed from the common share, the sum of the smaller shares, divided by the floor's. So
    they hardly depend on the number of accesses. Direction, mixture and correction are our reading.
    """
    def compare(a, b):
        p, q = a / a.sum(), b / b.sum()
        read = p > 0
        kl = (p[read] * np.log(p[read] / (0.9 * q[read] + 0.1 * p[read]))).sum()
        return kl, np.minimum(p, q).sum()

    def iou(common):
        return common / (2 - common)

    halves = [*itertools.permutations(positive), *itertools.permutations(negative)]
    kl_floor, floor = np.mean([compare(*pair) for pair in halves], 0)
    kl, common = np.mean([compare(*pair) for pair in itertools.product(positive, negative)], 0)
    if not floor:
        raise UserError("two halves of one class have no slot in common: too few examples to "
                        "compare classes")
    most = math.log(10)
    return {"kl_between": kl, "kl_floor": kl_floor,
            "kl": most * (kl - kl_floor) / (most - kl_floor),
            "iou_between": iou(common), "iou_floor": iou(floor), "iou": iou(common / floor)}


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Loss (nats), perplexity and accuracy of a language model over all predicted positions of
    `batches` (see data.heldout, and of a causal one data.next_tokens), of which there are
    masked_tokens, and under `layers` the usage_metrics of each memory layer. Returns (results, the
    counts of count_reads). A compiled model is run as its raw module."""
    model = getattr(model, "_orig_mod", model)
    was_training = model.training
    model.eval()
    loss = correct = masked = 0
    with count_reads(model) as counts:
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
    results = {"loss": loss / masked, "perplexity": math.exp(min(loss / masked, 700)),
               "accuracy": correct / masked, "masked_tokens": masked,
               "layers": {n: usage_metrics(**sums) for n, sums in counts.items()}}
    return results, counts


def describe_evaluation(results):
    """The results of evaluate as lines to print."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def last_used(snapshots, layer):
    """The number of the last of read_usage's snapshots at which each slot of a layer was top-1,
    counted from 1; 0: at none. (n_slots,)"""
    top1 = [arrays[f"layer{layer}_top1"] for arrays in snapshots.values()]
    return np.max([(counts > 0) * n for n, counts in enumerate(top1, 1)], axis=0)
