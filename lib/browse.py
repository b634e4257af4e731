"""
Read texts with a model to see which slots they read, and show what a slot knows.

page_data() gathers what the page of measure.py browse shows, and page_html() puts it into
browse.html as JSON. Larger memories want fewer --contexts.
"""
import collections
import itertools
import json
from pathlib import Path

import numpy as np
import torch

from lib.corpus import causal_heldout, cut_split
from lib.device import Progress, to_device, use_device
from lib.distributed import deal_batches
from lib.errors import UserError
from lib.run import Run, read_state
from lib.tasks import batches_by_length, find_task, load_examples, pad
from lib.tokenizer import load_tokenizer, special_ids, text_tokenizer
from lib.usage import count_reads, open_corpus, tally, usage_metrics, watch_reads
from lib.weights import check_objective, find_weights, load_model, load_run, read_weights
from model import value_tables

SEQUENCES = 512  # read by CorpusReads
WIDTH = 8  # tokens shown on either side; two contexts that agree there count as one


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on.

    Weights in Hugging Face layout have (number of positions, None).
    """
    folder, _ = find_weights(path)
    settings = Run(folder.parent).settings()
    longest = read_weights(folder)["config"].max_len
    return settings.get("seq_len", longest), settings.get("dataset")


def steps_and_seed(checkpoint):
    """Return how a checkpoint was trained: {"steps": "1,000 + 3,000", "seed": 1}.

    The steps are the initial model's and its own. "?" stands for Hugging Face's weights.
    """
    if not (checkpoint / "state.pt").is_file():
        return {"steps": "?", "seed": "?"}
    settings, steps = Run(checkpoint.parent).settings(), f"{read_state(checkpoint)['step']:,}"
    if settings["init_checkpoint"]:
        first = settings["first_step"]  # 0 for an initial model in Hugging Face layout
        steps = f"{first:,} + {steps}" if first else f"? + {steps}"
    return {"steps": steps, "seed": settings["seed"]}


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


def open_model(path, data, device):
    """Load the model at `path` with its tokenizer, and read a corpus with it.

    Returns (model, tokenizer, CorpusReads of data/<data>). The last is None without a memory.
    """
    device, _ = use_device(device, "float32")
    model, tokenizer = load_run(path)
    model.to(device)
    corpus = CorpusReads(model, path, data) if value_tables(model) else None
    return model, tokenizer, corpus


class CorpusReads:
    """Read the test text of a corpus with a model, nothing masked, at most SEQUENCES of it.

    path: the model's run. data: the corpus, None for the run's.
    Attributes: name and tokenizer of the corpus; ids (sequences, time); counts {layer: tally()}.
    """

    @torch.no_grad()
    def __init__(self, model, path, data):
        seq_len, trained_on = training_text(path)
        self.name = data or trained_on
        if not self.name:
            raise UserError(f"{path}: its corpus is not known: --data NAME")
        corpus = open_corpus(self.name, path)
        self.tokenizer = load_tokenizer(corpus.folder)
        if model.bert.config.causal:
            [batch] = causal_heldout(corpus, "test", seq_len, SEQUENCES, SEQUENCES)
            self.ids = batch["ids"]  # the last sequence may overlap the one before
        else:
            self.ids = cut_split(corpus, "test", seq_len, SEQUENCES)
        device = model.bert.words.weight.device
        reads = {layer: [] for layer in value_tables(model)}
        with watch_reads(model, lambda layer, *read: reads[layer].append(read)):
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{self.name}"):
                model.bert(batch.to(device))
        self.counts = {}
        self.reads = {}  # {layer: (weights (tokens, heads * topk), places in them of each slot)}
        for layer, batches in reads.items():
            slots, weights = map(torch.cat, zip(*batches))
            self.counts[layer] = tally(slots, weights, model.bert.config.n_keys**2)
            places = np.argsort(slots.flatten().numpy(), kind="stable")
            ends = self.counts[layer]["read"].cumsum()
            self.reads[layer] = weights.flatten(1), np.split(places, ends[:-1])

    def contexts(self, layer, slot, most):
        """List the contexts that read a slot with the most weight, at most `most`.

        Returns [(weight, text, token)]. weight is the sum over the heads. text has the token in «»
        and is listed once. token is its place in ids.flat.
        """
        weights, places = self.reads[layer]
        tokens = places[slot] // weights.shape[1]
        sums = collections.Counter()
        for token, weight in zip(tokens.tolist(), weights.flatten()[places[slot]].tolist()):
            sums[token] += weight
        found = {}
        for token, weight in sums.most_common():
            text = self.text(token)
            found.setdefault(text, (weight, text, token))
            if len(found) == most:
                break
        return list(found.values())

    def text(self, token):
        """Write a token in its context, with «» around it."""
        sequence, at = divmod(token, self.ids.shape[1])
        before, here, after = np.split(self.ids[sequence], [at, at + 1])
        parts = [before[-WIDTH:], here, after[:WIDTH]]
        left, middle, right = self.tokenizer.decode_batch(parts, skip_special_tokens=False)
        return f"{left} «{middle.strip()}» {right}".strip()


@torch.no_grad()
def print_guess(model, tokenizer, ids, position, corpus, most):
    """Print the likeliest tokens at a position of a text, and the slots read there.

    ids: of the text. corpus: a CorpusReads, for `most` contexts of each slot; None for a model
    without memory.
    """
    reads = {}
    ids = torch.tensor([ids], device=model.bias.device)
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})):
        chances = model(ids)[0, position].softmax(0)
    for probability, token in zip(*(part.tolist() for part in chances.topk(5))):
        print(f"  {probability:6.1%}  {tokenizer.id_to_token(token)}")
    for layer, (slots, weights) in reads.items():
        for head, (slot, *_) in enumerate(slots[position].tolist()):
            share = weights[position, head, 0]
            print(f"  layer {layer}, head {head + 1}: slot {slot} ({share:.2f}); its contexts:")
            for weight, text, _ in corpus.contexts(layer, slot, most):
                print(f"    ({weight:.2f}) {text}")


def task_usage(path, device):
    """Measure what a fine-tuned model reads in held-out text of its task (Table 6).

    Reads the dev split (MNLI: matched) if uniform use would make 95% of the slots top-1 there,
    about 3 accesses a slot; otherwise the train split (our reading). Returns a dict with task,
    split, examples (their number) and layers, {layer: usage_metrics}.
    """
    for split in ("dev", "train"):
        facts, examples = task_examples(path, split)
        counts = count_task_reads(path, examples, device)
        layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
        if all(usage["top1_mu_uniform"] > 0.95 for usage in layers.values()):
            break
    return {**facts, "layers": layers}


def task_examples(path, split):
    """Load a split of a fine-tuned run's task, "train" or "dev" (MNLI: matched).

    Returns {"task", "split", "examples": their number} and the Examples, or SQuAD's Windows.
    """
    checkpoint, vocab = find_weights(path)
    settings = Run(checkpoint.parent).settings()
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run (others: measure.py table RUN --data NAME)")
    task = find_task(settings["task"])
    if split == "dev":
        split = task.dev[""]
    examples = load_examples(task, split, text_tokenizer(vocab), settings["max_len"],
                             settings["doc_stride"])
    return {"task": task.name, "split": split, "examples": len(examples)}, examples


@torch.no_grad()
def count_task_reads(path, examples, device):
    """Count what the model at `path` reads in Examples or Windows (see count_reads)."""
    model = load_model(path).to(device).eval()
    lengths = np.array([len(example.ids) for example in examples])
    with count_reads(model) as counts:
        for index in deal_batches(Progress(batches_by_length(lengths, 32), path)):
            batch = pad([examples[n] for n in index])
            model.bert(**to_device(batch, device))
    return counts


def compare_classes(path, device):
    """Compare the top-1 slots of two classes before and after fine-tuning: records of Figure 4."""
    _, examples = task_examples(path, "train")
    parts = draw_parts(examples)
    labels = read_weights(path)["labels"]
    negative, positive = (labels[part[0].label] for part in parts[::3])
    facts = {"run": path, "classes": f"{positive} against {negative}"}
    start = Run(find_weights(path)[0].parent).settings()["init_checkpoint"]
    records = []
    for when, weights in (("before", start), ("after", path)):
        counts = [count_task_reads(weights, part, device) for part in parts]
        for layer in counts[0]:
            top1 = np.array([part[layer]["top1"] for part in counts])  # (6, n_slots)
            records.append({**facts, "when": when, "layer": layer,
                            **class_distances(top1[3:5], top1[:2]),
                            **whole_distances(top1[3:].sum(0), top1[:3].sum(0)),
                            "accesses": int(top1[[0, 1, 3, 4]].sum()) // 4})
    return records


def draw_parts(examples):
    """Part the examples of the two largest classes, at random.

    Returns six lists of Examples, three of each class, the lower class first. The first two of a
    class have as many Examples as half of the smaller class. The third has the others.
    """
    rng = np.random.default_rng(0)
    labels = np.array([example.label for example in examples])
    counts = np.bincount(labels)
    classes = np.sort(np.argsort(-counts, kind="stable")[:2])
    size = counts[classes].min() // 2
    parts = []
    for label in classes:
        drawn = [examples[n] for n in rng.permutation(np.flatnonzero(labels == label))]
        parts += [drawn[:size], drawn[size:2 * size], drawn[2 * size:]]
    return parts


def whole_distances(positive, negative):
    """Compute the paper's KL(t+ || t-), in nats, and IOU of two classes (Figure 4).

    positive, negative: top-1 counts (n_slots,) of all examples of a class. The KL is infinite where
    only positive examples read a slot. It is taken over the slots that both classes read, whose
    shares are normalised again (our reading).
    """
    p = positive / positive.sum()
    q = negative / negative.sum()
    iou = np.minimum(p, q).sum() / np.maximum(p, q).sum()
    both = (p > 0) & (q > 0)
    p = p[both] / p[both].sum()
    q = q[both] / q[both].sum()
    return {"kl_whole": divergence(p, q), "iou_whole": iou}


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). p and q are
    the slots' shares in a half of the positive and of the negative class. Our reading:
    - kl_between is KL(p || 0.9 q + 0.1 p) in nats, the mean over the four pairs of halves. The
      0.1 p bounds it by log 10.
    - iou_between is the sum of min(p, q) over the sum of max(p, q). Each sum is first averaged over
      the four pairs.
    - kl_floor and iou_floor compare the halves of one class: the noise of few accesses.
    """
    positive = positive / positive.sum(1, keepdims=True)
    negative = negative / negative.sum(1, keepdims=True)
    pairs = {"between": list(itertools.product(positive, negative)),
             "floor": [*itertools.permutations(positive), *itertools.permutations(negative)]}
    distances = {}
    for kind, shares in pairs.items():
        common = np.mean([np.minimum(p, q).sum() for p, q in shares])
        distances[f"kl_{kind}"] = np.mean([divergence(p, 0.9 * q + 0.1 * p) for p, q in shares])
        distances[f"iou_{kind}"] = common / (2 - common)  # the shares of each half sum to 1
    return distances


def divergence(p, q):
    """Compute KL(p || q) in nats, of shares (n_slots,). q is above 0 where p is."""
    read = p > 0
    return (p[read] * np.log(p[read] / q[read])).sum()


def page_data(corpus, most):
    """Gather what the page shows, as plain Python. corpus: a CorpusReads.

    most: contexts for a slot.
    """
    layers = []
    for layer, counts in corpus.counts.items():
        contexts = []  # of each slot: [(token, weight)]
        for slot in range(len(counts["read"])):
            found = corpus.contexts(layer, slot, most)
            contexts.append([(token, round(weight, 2)) for weight, _, token in found])
        layers.append({"layer": layer, "read": counts["read"].tolist(),
                       "top1": counts["top1"].tolist(), "contexts": contexts})
    used, text = np.unique(corpus.ids, return_inverse=True)
    mask = special_ids(corpus.tokenizer).mask  # in front, as a decoder drops the first space
    start, *pieces = corpus.tokenizer.decode_batch(
        [[mask], *([mask, token] for token in used)], skip_special_tokens=False)
    return {"seq_len": corpus.ids.shape[1],
            "text": text.ravel().tolist(),  # the number of each token in `pieces`
            "pieces": [piece.removeprefix(start) for piece in pieces],
            "layers": layers}


def page_html(data):
    """Make the page from its data. No text of a corpus can end the element that holds them: `<` is
    escaped, and the page sets text only, never HTML."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return template.replace("DATA", text.replace("<", "\\u003c"), 1)
