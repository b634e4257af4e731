"""
Count which slots the memories of a model read, for the metrics of section 3.2.

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

from lib.corpus import Corpus, causal_heldout, cut_split, masked_heldout
from lib.device import Progress, autocast, to_device
from lib.distributed import deal_batches, first_rank_first, sum_over_ranks
from lib.errors import UserError
from lib.run import Run, usage_key
from lib.tasks import batches_by_length, find_task, load_examples
from lib.tokenizer import load_tokenizer, read_vocab, text_tokenizer
from lib.weights import check_objective, find_weights, load_model, read_weights
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


def slot_staleness(path):
    """Count when slots were last top-1. Returns a record for each memory layer of a run: `slots` is
    {step of a snapshot, or "never": share of the slots}; `accesses` is of the last snapshot."""
    snapshots, records = Run(path).usage_snapshots(), []
    for layer in Run(path).settings()["memory_layers"]:
        last = last_used(snapshots, layer)
        shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
        accesses = snapshots[max(snapshots)][usage_key(layer, "top1")].sum()
        records.append({"run": path, "layer": layer, "accesses": int(accesses),
                        "slots": dict(zip(["never", *snapshots], shares.tolist(), strict=True))})
    return records


WIDTH = 8  # tokens shown on either side; two contexts that agree there count as one


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on. Weights in Hugging Face layout
    have (number of positions, None)."""
    folder, _ = find_weights(path)
    if (folder / "model.pt").is_file():
        settings = Run(folder.parent).settings(["seq_len", "dataset"])
        if settings["seq_len"] < 3:
            raise UserError(f"{folder.parent}/config.json: seq_len = {settings['seq_len']}: "
                            "expected at least 3")
        return settings["seq_len"], settings["dataset"]
    return read_weights(path)["config"].max_len, None


def corpus_name(path, data):
    """Return `data`, or else the corpus that a model was trained on. UserError without either."""
    if not (name := data or training_text(path)[1]):
        raise UserError(f"{path}: its corpus is not known: --data NAME")
    return name


def open_corpus(name, *paths):
    """Open data/<name>; UserError if the model of a path has another vocabulary."""
    corpus = Corpus(name)
    for path in paths:
        _, vocab = find_weights(path)
        if read_vocab(corpus.folder) != read_vocab(vocab):
            raise UserError(f"{path} was trained with another vocabulary than data/{name}: prepare "
                            f"the corpus with --vocab {vocab}, or leave one of them out")
    return corpus


class CorpusReads:
    """Read the test text of a corpus with a model, nothing masked.

    path: the model's run. data: the corpus, None for the run's. sequences: at most this number.
    Attributes: name and tokenizer of the corpus; ids (sequences, time); n_keys of the model;
    n_slots {layer: number}; layers {layer: (slots, weights)}, what the tokens read, arrays (tokens,
    heads, topk). In a pruned model the slots are its rows.
    """

    @torch.no_grad()
    def __init__(self, model, path, data, sequences):
        seq_len, _ = training_text(path)
        self.n_keys = model.bert.config.n_keys
        self.n_slots = {n: len(table.weight) for n, table in value_tables(model).items()}
        if not self.n_slots:
            raise UserError(f"{path}: a model without memory has no slots")
        self.name = corpus_name(path, data)
        corpus = open_corpus(self.name, path)
        self.tokenizer = load_tokenizer(corpus.folder)
        if model.bert.config.causal:
            [batch] = causal_heldout(corpus, "test", seq_len, sequences, sequences)
            self.ids = batch["ids"][(batch["labels"] != -100).all(1)]  # the last one may overlap
        else:
            self.ids = cut_split(corpus, "test", seq_len, sequences)
        device, reads = model.bert.words.weight.device, {layer: [] for layer in self.n_slots}
        with watch_reads(model, lambda layer, *read: reads[layer].append(read)):
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{self.name}"):
                model.bert(batch.to(device))
        self.layers = {layer: [torch.cat(tensors).numpy() for tensors in zip(*batches, strict=True)]
                       for layer, batches in reads.items()}

    def contexts(self, layer, slot, most):
        """List the contexts that read a slot with the most weight, at most `most`. Returns
        [(weight, text)]: the sum over the heads, and the text once, with the token in «»."""
        slots, weights = self.layers[layer]
        where = np.nonzero(slots == slot)
        weight, texts = np.bincount(where[0], weights[where]), {}
        for token in np.argsort(-weight, kind="stable")[:np.count_nonzero(weight)]:
            sequence, at = divmod(token, self.ids.shape[1])
            before, here, after = np.split(self.ids[sequence], [at, at + 1])
            left, middle, right = self.tokenizer.decode_batch(
                [before[-WIDTH:], here, after[:WIDTH]], skip_special_tokens=False)
            texts.setdefault(f"{left} «{middle.strip()}» {right}".strip(), weight[token].item())
            if len(texts) == most:
                break
        return [(weight, text) for text, weight in texts.items()]


@torch.no_grad()
def print_guess(model, tokenizer, ids, position, corpus, most):
    """Print the likeliest tokens at a position of a text, and the slots read there. ids: of the
    text. corpus: a CorpusReads for `most` contexts of each slot, or None."""
    reads = {}
    ids, positions = (torch.tensor([x], device=model.bias.device) for x in (ids, [position]))
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})):
        best = model(ids, positions=positions)[0, 0].softmax(0).topk(5)
    for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(f"  {probability:6.1%}  {tokenizer.id_to_token(token)}")
    for layer, (slots, weights) in reads.items():
        print(f"  layer {layer} read, slot (weight), best 3 of {slots.shape[-1]} per head; what "
              "else reads the best")
        slots, weights = (x[position, :, :3].tolist() for x in (slots, weights))
        for head, (best3, shares) in enumerate(zip(slots, weights, strict=True), 1):
            pairs = [f"{slot} ({share:.2f})" for slot, share in zip(best3, shares, strict=True)]
            print(f"    head {head}: {'  '.join(pairs)}")
            for weight, text in corpus.contexts(layer, best3[0], most) if corpus else []:
                print(f"      ({weight:.2f}) {text}")


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Evaluate a language model on batches of masked_heldout or causal_heldout. Returns (results,
    the counts of count_reads). results: loss (nats), perplexity and accuracy over all predicted
    positions; masked_tokens, their number; layers, {layer: usage_metrics}. With n_rows, the usage
    counts the rows of a pruned memory, not slots. A compiled model is run as its raw module."""
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
    if not masked:
        raise UserError("the held-out text has no word to predict: more text, or more of it held "
                        "out (prepare_data.py text --val_every)")
    results = {"loss": loss / masked, "perplexity": math.exp(min(loss / masked, 700)),
               "accuracy": correct / masked, "masked_tokens": masked,
               "layers": {n: usage_metrics(**sums) for n, sums in counts.items()}}
    return results, counts


def describe_evaluation(results):
    """Yield the results of evaluate_language_model as lines to print."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


def check_same_text(paths):
    """Return the corpus of pretrained runs; UserError if their perplexities are of other texts."""
    what = {"tokenizer_hash": "vocabulary", "dataset": "corpus", "objective": "objective",
            "seq_len": "sequence length"}
    runs = [Run(path).settings(what) for path in paths]
    what["data"] = "text of the same name"  # runs of older versions do not say
    for path, settings in zip(paths, runs, strict=True):
        for key, name in what.items():
            if settings.get(key, runs[0].get(key)) != runs[0].get(key, settings.get(key)):
                raise UserError(f"{path} has another {name} than {paths[0]}: their perplexities "
                                "cannot be compared")
    return runs[0]["dataset"]


def comparable_evaluations(paths):
    """Read the evaluations of pretrained runs: (corpus, {path: evaluations}). UserError if they
    are of other texts, or the last ones of other sequences."""
    corpus, runs = check_same_text(paths), {path: Run(path).evaluations() for path in paths}
    first = runs[paths[0]][-1]["masked_tokens"]
    for path, evaluations in runs.items():
        if (tokens := evaluations[-1]["masked_tokens"]) != first:
            raise UserError(f"{path} was evaluated on {tokens:,} tokens, {paths[0]} on {first:,}: "
                            "their perplexities cannot be compared (eval_sequences)")
    return corpus, runs


def table_batches(causal, corpus, split, seq_len, batch_size, sequences, masking=0):
    """Make the batches on which tables measure perplexity. Windows of causal models overlap by
    half, and each token is predicted once. masking: the number of a random masking."""
    text = corpus, split, seq_len, batch_size, sequences
    if causal:
        return causal_heldout(*text, stride=seq_len // 2)
    return masked_heldout(*text, masking)


def evaluate_runs(paths, corpora, device, dtype, batch_size, sequences=None, maskings=1):
    """Evaluate language models on the same batches of corpora's test splits (see table_batches). At
    most `sequences` sequences of each split are read, of the shortest length that a model was
    trained on. Returns (sequence length, records for JSON)."""
    causal = read_weights(paths[0])["config"].causal
    if causal and maskings > 1:
        raise UserError(f"--repeats {maskings}: a causal model has no maskings to repeat")
    for path in paths:  # report mistakes before the long work starts
        check_language_model(path, causal)
    seq_len = min(training_text(path)[0] for path in paths)
    heldout, records = {}, []
    for name in corpora:
        text = open_corpus(name, *paths), "test", seq_len, batch_size, sequences
        heldout[name] = [table_batches(causal, *text, masking) for masking in range(maskings)]
    for path in paths:
        checkpoint, _ = find_weights(path)
        print(f"{path}: weights of {checkpoint}")
        model = load_model(checkpoint).to(device)
        results = {name: [] for name in corpora}
        for name, drawn in heldout.items():
            for batches in drawn:
                batches = Progress(batches, f"{path}, data/{name}")
                evaluation, _ = evaluate_language_model(model, batches, device, dtype)
                results[name].append(evaluation)
        trained = Run(checkpoint.parent).steps_and_seed(checkpoint)
        records.append({"run": path, "checkpoint": str(checkpoint), **trained, "results": results})
    return seq_len, records


def task_usage(path, sequences, device):
    """Measure the slot usage of a fine-tuned run in its training examples: Table 6, for JSON."""
    _, _, task, examples, chosen = training_examples(path, sequences)
    counts = count_task_reads(path, examples, chosen, device, path)
    layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
    return {"run": path, "task": task.name, "examples": len(chosen), "layers": layers}


def compare_classes(path, sequences, device):
    """Compare the top-1 slots of two classes before and after fine-tuning: Figure 4, for JSON."""
    settings, config, task, examples, chosen = training_examples(path, sequences)
    halves, records = draw_halves(task, examples, chosen), []
    if not (config.memory_layers and config.beta):
        raise UserError(f"{path}: a model without memory has no slots to compare")
    for when, weights in (("before", settings["init_checkpoint"]), ("after", path)):
        title = f"{path}, {when}, class"
        counts = [[count_task_reads(weights, examples, half, device, f"{title} {label}, half {n}")
                   for n, half in enumerate(halves[label], 1)] for label in (1, 0)]
        for layer in counts[0][0]:
            top1 = np.array([[half[layer]["top1"] for half in of_class] for of_class in counts])
            records.append({"run": path, "when": when, "layer": layer, **class_distances(*top1),
                            "accesses": int(top1.sum()) // 4})
    return records


def training_examples(path, sequences):
    """Load the training examples of a fine-tuned run. Returns its settings, its model's
    BertConfig, its Task, the examples, and indices of `sequences` examples, evenly spread. None
    stands for all."""
    checkpoint, vocab = find_weights(path)
    settings = Run(checkpoint.parent).settings()
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run; table takes others with --data NAME")
    print(f"{path}: weights of {checkpoint}")
    config = read_weights(checkpoint)["config"]
    with first_rank_first():
        task = find_task(settings["task"])
    examples = load_examples(task, "train", text_tokenizer(vocab), settings["max_len"],
                             settings["doc_stride"])
    total = len(examples.ids)
    chosen = np.linspace(0, total - 1, min(sequences or total, total)).astype(int)
    return settings, config, task, examples, chosen


@torch.no_grad()
def count_task_reads(path, examples, chosen, device, title):
    """Count what the model at `path` reads in the examples `chosen` (see count_reads)."""
    model = load_model(path).to(device).eval()
    batches = batches_by_length(examples.lengths[chosen], 32)
    with count_reads(model) as counts:
        for batch in deal_batches(Progress(batches, title)):
            model.bert(**to_device(examples.pad(chosen[batch]), device))
    return counts


def draw_halves(task, examples, chosen):
    """Draw two halves of each class, all of one size: a list of indices (2, size)."""
    labels, rng = examples.labels[chosen], np.random.default_rng(0)
    classes = [chosen[labels == label] for label in range(len(task.labels))]
    size = min(map(len, classes), default=0) // 2
    if len(classes) != 2 or not size:
        raise UserError(f"{task.folder}: expected two classes with two examples or more, found "
                        f"{[len(members) for members in classes]} examples")
    return [rng.permutation(members)[:2 * size].reshape(2, size) for members in classes]


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). Call the
    slots' shares in a positive half p, in a negative half q. All this is our reading:
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

    def iou(common):
        return common / (2 - common)

    positive, negative = (x / x.sum(1, keepdims=True) for x in (positive, negative))
    halves = [*itertools.permutations(positive), *itertools.permutations(negative)]
    kl_floor, floor = np.mean([compare(*pair) for pair in halves], 0)
    kl, common = np.mean([compare(*pair) for pair in itertools.product(positive, negative)], 0)
    if not floor:
        raise UserError("two halves of one class have no slot in common: too few examples")
    most = math.log(10)
    return {"kl_between": kl, "kl_floor": kl_floor,
            "kl": most * (kl - kl_floor) / (most - kl_floor),
            "iou_between": iou(common), "iou_floor": iou(floor), "iou": iou(common / floor)}
