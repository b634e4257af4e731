"""
Count which slots the memories of a model read, and evaluate language models.

>>> with count_reads(model) as counts:
...     model(ids)
>>> usage_metrics(**counts[4])                      # of layer 4: MU, top-1 MU, KL_u, KL_w
"""
import contextlib
import math
from collections import Counter
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from lib.device import autocast, to_device
from lib.ranks import deal_batches, sum_over_ranks
from model import value_tables


@contextlib.contextmanager
def watch_reads(model, on_read):
    """Call on_read(layer, slots, weights) at every memory lookup inside the block.

    Both tensors are on the CPU: (tokens, heads, topk), best first, without padded tokens. Call the
    model itself inside, not what torch.compile returned: its graphs call no hooks.
    """
    def hook(layer, table, args, output):
        slots = args[0].detach().cpu()
        weights = args[1].detach().cpu()
        real = weights.any(2).any(1)  # the weights of a padded token are 0
        on_read(layer, slots[real], weights[real])

    hooks = [table.register_forward_hook(partial(hook, layer))
             for layer, table in value_tables(model).items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@contextlib.contextmanager
def count_reads(model):
    """Count what every memory reads inside the block: {layer: counts of tally()}.

    When the block ends, the counts are summed over the ranks.
    """
    tables = value_tables(model)
    nothing = torch.zeros(0, 1, 1, dtype=torch.int), torch.zeros(0, 1, 1)
    counts = {layer: Counter(tally(*nothing, len(table.weight)))
              for layer, table in tables.items()}

    def count(layer, slots, weights):
        counts[layer].update(tally(slots, weights, len(tables[layer].weight)))  # adds

    with watch_reads(model, count):
        yield counts
    for sums in counts.values():
        for name in sums:
            sums[name] = sum_over_ranks(sums[name])


def tally(slots, weights, n_slots):
    """Count the accesses of a lookup.

    An access is one head reading for one token, which we take to be x in section 3.2. slots,
    weights: tensors (tokens, heads, topk), best first. Returns a dict:

    - read (n_slots,): how often each slot was among the top k
    - top1 (n_slots,): how often it was the best
    - weight (n_slots,): the sum of its softmax weights
    - effective_k: the sum of exp(entropy of the weights) over the accesses
    """
    weights = weights.double()
    entropy = torch.special.entr(weights).sum(2)  # (tokens, heads)
    return {"read": np.bincount(slots.flatten(), minlength=n_slots),
            "top1": np.bincount(slots[..., 0].flatten(), minlength=n_slots),
            "weight": np.bincount(slots.flatten(), weights.flatten(), n_slots),
            "effective_k": entropy.exp().sum().item()}


def usage_metrics(read, top1, weight, effective_k):
    """Compute the metrics of section 3.2 from a layer's counts (see tally).

    The KLs are in nats. mu_uniform and top1_mu_uniform are the MUs expected if slots were chosen at
    random, with as many accesses.
    """
    n_slots = len(read)
    accesses = int(top1.sum())
    topk = int(read.sum()) / accesses

    def kl_to_uniform(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        return float(math.log(n_slots) + (share * np.log(share)).sum())

    return {"mu": float((read > 0).mean()),
            "top1_mu": float((top1 > 0).mean()),
            "kl_u": kl_to_uniform(read),
            "kl_w": kl_to_uniform(weight),
            "effective_k": effective_k / accesses,
            "accesses": accesses,
            "mu_uniform": 1 - (1 - topk / n_slots) ** accesses,
            "top1_mu_uniform": 1 - (1 - 1 / n_slots) ** accesses}


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Measure perplexity and slot usage on batches of masked_heldout or causal_heldout.

    Returns (results, the counts of count_reads). results: loss (nats), perplexity and accuracy over
    all predicted positions; masked_tokens, their number; layers, {layer: usage_metrics}.
    """
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
