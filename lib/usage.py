"""
See which slots memories read, and which tokens read a slot. Copy it beside pkm.py.

tables: {name: ValueTable}, with any model around them. It needs numpy and torch alone.
count_reads() is for texts of any length: it keeps the counts, and not the reads.

>>> with torch.no_grad(), record_reads(tables) as reads:
...     out = model.eval()(x)               # then model.train()
>>> metrics = usage_metrics(**reads["memory.values"].counts)   # MU, top-1 MU, KL_u, KL_w
>>> for slot in reads["memory.values"].top_slots(10):
...     found = reads["memory.values"].contexts(slot, 5)   # [(weight, place of token)]
"""
import contextlib
import math
from collections import Counter
from functools import partial

import numpy as np
import torch

NOTHING = torch.zeros(0, 1, 1, dtype=torch.int), torch.zeros(0, 1, 1)  # slots, weights of no token


@contextlib.contextmanager
def watch_reads(tables, on_read):
    """Call on_read(name, slots, weights) at every memory lookup inside the block.

    Both tensors are on the CPU: (tokens, heads, topk), best first. The weights of a padded token
    are 0. Compiled models run uncompiled inside: a compiled graph calls no hooks.
    """
    def hook(name, table, args, output):
        on_read(name, args[0].detach().cpu(), args[1].detach().cpu())

    hooks = [table.register_forward_hook(partial(hook, name)) for name, table in tables.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in hooks:
            handle.remove()


@contextlib.contextmanager
def count_reads(tables, sum_over_ranks=lambda counts: counts):
    """Count what every memory reads inside the block: {name: counts of tally()}.

    sum_over_ranks: sums an array or a number over the ranks, when the block ends.
    """
    counts = {name: tally(*NOTHING, len(table.weight)) for name, table in tables.items()}

    def count(name, slots, weights):
        found = tally(slots, weights, len(tables[name].weight))
        for what in found:
            counts[name][what] = counts[name][what] + found[what]

    with watch_reads(tables, count):
        yield counts
    for sums in counts.values():
        for what in sums:
            sums[what] = sum_over_ranks(sums[what])


@contextlib.contextmanager
def record_reads(tables):
    """Record what every memory reads inside the block: {name: Reads}, filled when it ends."""
    found, reads = {name: [] for name in tables}, {}
    with watch_reads(tables, lambda name, *read: found[name].append(read)):
        yield reads
    for name, parts in found.items():
        slots, weights = map(torch.cat, zip(*parts or [NOTHING]))
        reads[name] = Reads(slots, weights, len(tables[name].weight))


class Reads:
    """The reads of one memory: how often each slot was read, and by which tokens.

    slots, weights: tensors (tokens, heads, topk). counts: those of tally().
    """

    def __init__(self, slots, weights, n_slots):
        self.counts = tally(slots, weights, n_slots)
        self.ends = self.counts["read"].cumsum()  # where each slot's reads end in `order`
        weights = weights.flatten(1)
        slots = slots.flatten(1).where(weights.any(1, keepdim=True), n_slots)  # padding: last
        self.order = np.argsort(slots.flatten().numpy(), kind="stable")
        self.weights = weights.numpy()  # (tokens, heads * topk)

    def top_slots(self, most):
        """List the slots that were read most often, at most `most`."""
        return np.argsort(-self.counts["read"], kind="stable")[:most].tolist()

    def contexts(self, slot, most=None):
        """List the tokens that read a slot, [(weight, token)], the largest weights first.

        weight: the sum over the heads. token: its place among all tokens inside the block, padding
        included. most: how many to list; None: all.
        """
        end = self.ends[slot]
        places = self.order[end - self.counts["read"][slot]:end]
        tokens = places // self.weights.shape[1]
        sums = Counter()
        for token, weight in zip(tokens.tolist(), self.weights.flat[places].tolist()):
            sums[token] += weight
        return [(weight, token) for token, weight in sums.most_common(most)]


def tally(slots, weights, n_slots):
    """Count the accesses of a lookup.

    An access is one head reading for one token, which we take to be x in section 3.2. slots,
    weights: tensors (tokens, heads, topk), best first. Padded tokens do not count: their weights
    are 0. Returns a dict:

    - read (n_slots,): how often each slot was among the top k
    - top1 (n_slots,): how often it was the best
    - weight (n_slots,): the sum of its softmax weights
    - effective_k: the sum of exp(entropy of the weights) over the accesses
    """
    real = weights.flatten(1).any(1)
    slots, weights = slots[real], weights[real].double()
    entropy = torch.special.entr(weights).sum(2)  # (tokens, heads)
    return {"read": np.bincount(slots.flatten(), minlength=n_slots),
            "top1": np.bincount(slots[..., 0].flatten(), minlength=n_slots),
            "weight": np.bincount(slots.flatten(), weights.flatten(), n_slots),
            "effective_k": entropy.exp().sum().item()}


def usage_metrics(read, top1, weight, effective_k):
    """Compute the metrics of Kim & Jung (2020), section 3.2, from a layer's counts (see tally).

    mu and top1_mu are shares of the slots, kl_u and kl_w are in nats. accesses: real tokens x
    heads. mu_uniform and top1_mu_uniform are the shares that the same number of accesses would
    reach, on average, if they went to random slots. Without an access all but the shares are nan.
    """
    n_slots = len(read)
    accesses = int(top1.sum())
    topk = int(read.sum()) / max(accesses, 1)

    def kl_to_uniform(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        kl = math.log(n_slots) + (share * np.log(share)).sum()
        return float(kl) if accesses else math.nan

    return {"mu": float((read > 0).mean()),
            "top1_mu": float((top1 > 0).mean()),
            "kl_u": kl_to_uniform(read),
            "kl_w": kl_to_uniform(weight),
            "effective_k": effective_k / accesses if accesses else math.nan,
            "accesses": accesses,
            "mu_uniform": 1 - (1 - topk / n_slots) ** accesses,
            "top1_mu_uniform": 1 - (1 - 1 / n_slots) ** accesses}
