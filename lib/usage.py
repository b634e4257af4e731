"""
Count which slots the memories of a model read, and evaluate language models.

>>> with count_reads(model) as counts:
...     model(ids)
>>> usage_metrics(**counts[4])                      # of layer 4: MU, top-1 MU, KL_u, KL_w
"""
import contextlib
import itertools
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from lib.corpus import Corpus, causal_heldout, masked_heldout
from lib.device import Progress, autocast, to_device
from lib.distributed import deal_batches, sum_over_ranks
from lib.errors import UserError
from lib.run import Run
from lib.tokenizer import read_vocab
from lib.weights import check_objective, find_weights, load_model, read_weights
from model import value_tables


@contextlib.contextmanager
def watch_reads(model, see):
    """Call see(layer, slots, weights) at every memory lookup inside the block.

    Both tensors are on the CPU: (tokens, heads, topk), best first, without padded tokens. A
    compiled model runs uncompiled here, because its graphs call no hooks.
    """
    def hook(layer, table, args, output):
        slots = args[0].detach().cpu()
        weights = args[1].detach().cpu()
        real = weights.any(2).any(1)  # the weights of a padded token are 0
        see(layer, slots[real], weights[real])

    hooks = [table.register_forward_hook(partial(hook, layer))
             for layer, table in value_tables(model).items()]
    try:
        with torch.compiler.set_stance("force_eager"):
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
    counts = {layer: tally(*nothing, len(table.weight)) for layer, table in tables.items()}

    def count(layer, slots, weights):
        for name, number in tally(slots, weights, len(tables[layer].weight)).items():
            counts[layer][name] = counts[layer][name] + number

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

    The KLs are in nats. mu_uniform and top1_mu_uniform are the shares of the slots that the same
    number of accesses to random slots would use.
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


def shared_batches(paths, corpora, batch_size, sequences, maskings):
    """Make test batches on which all language models at `paths` can be evaluated.

    Returns (seq_len, {corpus: a list of maskings, each a list of batches}). seq_len is the shortest
    that a model was trained on. sequences: at most this number; None: all.
    """
    causal = read_weights(paths[0])["config"].causal
    for path in paths:
        check_language_model(path, causal)
    seq_len = min(training_text(path)[0] for path in paths)
    heldout = {}
    for name in corpora:
        text = open_corpus(name, *paths), "test", seq_len, batch_size, sequences
        if causal:  # windows overlap by half, and each token is predicted once
            heldout[name] = [causal_heldout(*text, stride=seq_len // 2)]
        else:
            heldout[name] = [masked_heldout(*text, masking) for masking in range(maskings)]
    return seq_len, heldout


def evaluate_run(path, heldout, device, dtype):
    """Evaluate a language model on what shared_batches returns: a record of Table 2."""
    checkpoint, _ = find_weights(path)
    print(f"{path}: weights of {checkpoint}")
    model = load_model(checkpoint).to(device)
    results = {}
    for name, maskings in heldout.items():
        results[name] = []
        for batches in maskings:
            batches = Progress(batches, f"{path}, data/{name}")
            evaluation, _ = evaluate_language_model(model, batches, device, dtype)
            results[name].append(evaluation)
    trained = Run(checkpoint.parent).steps_and_seed(checkpoint)
    return {"run": path, "checkpoint": str(checkpoint), **trained, "results": results}


def describe_evaluation(results):
    """Yield the results of evaluate_language_model as lines to print."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on.

    Weights in Hugging Face layout have (number of positions, None).
    """
    folder, _ = find_weights(path)
    settings = {"seq_len": read_weights(folder)["config"].max_len, "dataset": None}
    settings |= Run(folder.parent).settings()
    return settings["seq_len"], settings["dataset"]


def open_corpus(name, *paths):
    """Open data/<name>; UserError if the model of a path has another vocabulary."""
    corpus = Corpus(name)
    for path in paths:
        _, vocab = find_weights(path)
        if read_vocab(corpus.folder) != read_vocab(vocab):
            raise UserError(f"{path} was trained with another vocabulary than data/{name}: prepare "
                            f"the corpus with --vocab {vocab}, or leave one of them out")
    return corpus


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


def comparable_evaluations(paths):
    """Read the logged evaluations of pretrained runs: {path: a list of results}.

    UserError if the perplexities are of other texts, or the last ones of another number of tokens.
    """
    names = {"tokenizer_hash": "vocabulary", "dataset": "corpus", "objective": "objective",
             "seq_len": "sequence length", "data": "text of the same name",
             "masked_tokens": "number of held-out tokens (eval_sequences)"}
    runs, facts = {}, {}
    for path in paths:
        runs[path] = Run(path).evaluations()
        facts[path] = Run(path).settings(["dataset"]) | runs[path][-1]
        for key, name in names.items():
            if facts[path][key] != facts[paths[0]][key]:
                raise UserError(f"{path} has another {name} than {paths[0]}: their perplexities "
                                "cannot be compared")
    return runs


def last_used(snapshots, layer):
    """Find the last usage snapshot in which each slot was top-1.

    snapshots: what Run.usage_snapshots() returns. Returns (n_slots,): the number of the snapshot,
    counted from 1; 0 for none.
    """
    last = 0
    for number, arrays in enumerate(snapshots.values(), 1):
        last = np.where(arrays[f"layer{layer}_top1"] > 0, number, last)
    return last


def slot_staleness(path):
    """Count when the slots of a run were last top-1 (Figure 2).

    Returns a record for each memory layer. Its `slots` is {step of a snapshot, or "never": share of
    the slots}. Its `accesses` are those of the last snapshot.
    """
    snapshots = Run(path).usage_snapshots()
    newest = snapshots[max(snapshots)]
    records = []
    for layer in Run(path).settings()["memory_layers"]:
        last = last_used(snapshots, layer)
        shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
        records.append({"run": path, "layer": layer,
                        "accesses": int(newest[f"layer{layer}_top1"].sum()),
                        "slots": dict(zip(["never", *snapshots], shares.tolist(), strict=True))})
    return records


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). p and q are
    the slots' shares in a half of the positive and of the negative class. Our reading:
    - kl_between is KL(p || 0.9 q + 0.1 p) in nats, the mean over the four pairs of halves. The
      0.1 p bounds it by log 10.
    - iou_between is the sum of min(p, q) over the sum of max(p, q). Each sum is first averaged over
      the four pairs.
    - kl_floor and iou_floor compare the halves of one class: the noise of few accesses.
    - kl is scaled to 0 at the floor, with log 10 unchanged.
    - iou comes from the sum of min(p, q), divided by the floor's.
    """
    def compare(p, q):
        read = p > 0
        kl = (p[read] * np.log(p[read] / (0.9 * q + 0.1 * p)[read])).sum()
        return kl, np.minimum(p, q).sum()

    def iou(common):  # the shares of each half sum to 1
        return common / (2 - common)

    positive = positive / positive.sum(1, keepdims=True)
    negative = negative / negative.sum(1, keepdims=True)
    halves = [*itertools.permutations(positive), *itertools.permutations(negative)]
    pairs = itertools.product(positive, negative)
    kl_floor, common_floor = np.mean([compare(p, q) for p, q in halves], 0)
    kl, common = np.mean([compare(p, q) for p, q in pairs], 0)
    most = math.log(10)
    return {"kl_between": kl,
            "kl_floor": kl_floor,
            "kl": most * (kl - kl_floor) / (most - kl_floor),
            "iou_between": iou(common),
            "iou_floor": iou(common_floor),
            "iou": iou(common / common_floor)}
