"""
Count which slots the memories of a model read, for the metrics of section 3.2.

>>> with count_reads(model) as counts:
...     model(ids)
>>> usage_metrics(**counts[4])                      # of layer 4: MU, top-1 MU, KL_u, KL_w
"""
import contextlib
import math
from functools import partial

import numpy as np
import torch

from lib.distributed.processes import sum_over_ranks
from lib.weights.run import usage_key
from model import value_tables


@contextlib.contextmanager
def watch_reads(model, see):
    """Call see(layer, slots, weights) at every memory lookup inside the block. The tensors are on
    the CPU, (tokens, heads, topk), best first, without padded tokens. A compiled model calls no
    hooks: run the raw one."""
    def hook(layer, table, read, output):
        slots, weights = (x.detach().cpu() for x in read[:2])
        real = weights.any(2).any(1)  # the weights of a padded token are 0
        see(layer, slots[real], weights[real])

    hooks = [table.register_forward_hook(partial(hook, layer))
             for layer, table in value_tables(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@contextlib.contextmanager
def count_reads(model):
    """Count what every memory reads inside the block.

    When the block ends, the counts are summed over the ranks. counts[layer] is a dict. `read`,
    `top1` and `weight` are (n_slots,) arrays. `read` counts how often a slot was among the top k,
    `top1` how often it was the best. `weight` is the sum of its softmax weights. `topk` is an int.
    `effective_k` sums exp(entropy of the weights) over the accesses. An access is one lookup by one
    head for one token, which we take to be x in section 3.2.
    """
    sizes = {layer: len(table.weight) for layer, table in value_tables(model).items()}
    counts = {layer: {"read": np.zeros(n_slots, int), "top1": np.zeros(n_slots, int),
                      "weight": np.zeros(n_slots), "effective_k": 0.0}
              for layer, n_slots in sizes.items()}

    def count(layer, slots, weights):
        sums, n_slots, weights = counts[layer], sizes[layer], weights.double()
        read, top1 = times_read(slots.numpy(), n_slots)
        sums["read"] += read
        sums["top1"] += top1
        sums["weight"] += np.bincount(slots.flatten(), weights.flatten(), n_slots)
        sums["effective_k"] += torch.special.entr(weights).sum(-1).exp().sum().item()
        sums["topk"] = slots.shape[-1]

    with watch_reads(model, count):
        yield counts
    for sums in counts.values():
        for name in ("read", "top1", "weight", "effective_k"):
            sums[name] = sum_over_ranks(sums[name])


def times_read(slots, n_slots):
    """Count how often each slot is read, and how often it is the best: (n_slots,) both.
    slots: (tokens, heads, topk), best first."""
    return [np.bincount(read.ravel(), minlength=n_slots) for read in (slots, slots[..., 0])]


def usage_metrics(read, top1, weight, topk, effective_k):
    """Compute the metrics of section 3.2 from a layer's counts (see count_reads). The KLs are in
    nats. mu_uniform and top1_mu_uniform are for the same number of accesses to random slots."""
    n_slots, accesses = len(read), int(top1.sum())

    def kl_to_uniform(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        return float(math.log(n_slots) + (share * np.log(share)).sum())

    def uniform(k):
        return 1 - max(0, 1 - k / n_slots) ** accesses

    return {"mu": float((read > 0).mean()), "top1_mu": float((top1 > 0).mean()),
            "kl_u": kl_to_uniform(read), "kl_w": kl_to_uniform(weight),
            "effective_k": effective_k / accesses, "accesses": accesses,
            "mu_uniform": uniform(topk), "top1_mu_uniform": uniform(1)}


def last_used(snapshots, layer):
    """Return the number of the last snapshot in which each slot was top-1. (n_slots,), counted from
    1; 0 if there is none. snapshots: what Run.usage_snapshots() returns."""
    top1 = [arrays[usage_key(layer, "top1")] for arrays in snapshots.values()]
    return np.max([(counts > 0) * n for n, counts in enumerate(top1, 1)], axis=0)


def same_unit(evaluations):
    """Keep the evaluations that count what the first counts: slots, or rows of pruned memories."""
    unit = evaluations[0].get("n_rows")
    return [evaluation for evaluation in evaluations if evaluation.get("n_rows") == unit]
