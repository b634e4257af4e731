"""
Read texts with a model to see which slots they read, and show what a slot knows.

page_data() gathers what the page of measure.py browse shows, and page_html() puts it into
browse.html as JSON. Larger memories want fewer --contexts.
"""
import itertools
import json
from pathlib import Path

import numpy as np
import torch

from lib.corpus import causal_heldout, cut_split, spread
from lib.device import Progress, to_device
from lib.distributed import deal_batches, first_rank_first
from lib.errors import UserError
from lib.run import Run
from lib.tasks import batches_by_length, find_task, load_examples, pad
from lib.tokenizer import load_tokenizer, special_ids, text_tokenizer
from lib.usage import count_reads, open_corpus, tally, watch_reads
from lib.weights import check_objective, find_weights, load_model, read_weights
from model import value_tables

WIDTH = 8  # tokens shown on either side; two contexts that agree there count as one
SLOTS = 8  # shown for a token


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on.

    Weights in Hugging Face layout have (number of positions, None).
    """
    folder, _ = find_weights(path)
    settings = {"seq_len": read_weights(folder)["config"].max_len, "dataset": None}
    settings |= Run(folder.parent).settings()
    return settings["seq_len"], settings["dataset"]


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


class CorpusReads:
    """Read the test text of a corpus with a model, nothing masked.

    path: the model's run. data: the corpus, None for the run's. sequences: at most this number.
    Attributes: name and tokenizer of the corpus; ids (sequences, time); n_keys of the model;
    layers {layer: (slots, weights)}, what the tokens read, arrays (tokens, heads, topk).
    """

    @torch.no_grad()
    def __init__(self, model, path, data, sequences):
        seq_len, trained_on = training_text(path)
        self.name = data or trained_on
        if not self.name:
            raise UserError(f"{path}: its corpus is not known: --data NAME")
        corpus = open_corpus(self.name, path)
        self.tokenizer = load_tokenizer(corpus.folder)
        self.n_keys = model.bert.config.n_keys
        if model.bert.config.causal:
            [batch] = causal_heldout(corpus, "test", seq_len, sequences, sequences)
            self.ids = batch["ids"][(batch["labels"] != -100).all(1)]  # the last one may overlap
        else:
            self.ids = cut_split(corpus, "test", seq_len, sequences)
        device = model.bert.words.weight.device
        reads = {layer: [] for layer in value_tables(model)}
        with watch_reads(model, lambda layer, *read: reads[layer].append(read)):
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{self.name}"):
                model.bert(batch.to(device))
        self.layers = {}
        for layer, batches in reads.items():
            slots, weights = zip(*batches)
            self.layers[layer] = torch.cat(slots), torch.cat(weights)

    def contexts(self, layer, slot, most):
        """List the contexts that read a slot with the most weight, at most `most`.

        Returns [(weight, text)]: the sum over the heads, and the text once, with the token in «».
        """
        slots, weights = self.layers[layer]
        weight = weights.where(slots == slot, 0).sum((1, 2), dtype=torch.double)  # of each token
        texts = {}
        for token in weight.argsort(descending=True, stable=True)[:weight.count_nonzero()].tolist():
            sequence, at = divmod(token, self.ids.shape[1])
            before, here, after = np.split(self.ids[sequence], [at, at + 1])
            parts = [before[-WIDTH:], here, after[:WIDTH]]
            left, middle, right = self.tokenizer.decode_batch(parts, skip_special_tokens=False)
            texts.setdefault(f"{left} «{middle.strip()}» {right}".strip(), weight[token].item())
            if len(texts) == most:
                break
        return [(weight, text) for text, weight in texts.items()]


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
        print(f"  layer {layer} read, slot (weight), best 3 of {slots.shape[2]} per head; what "
              "else reads the best")
        for head, best in enumerate(slots[position, :, :3].tolist()):
            shares = weights[position, head].tolist()
            pairs = "  ".join(f"{slot} ({share:.2f})" for slot, share in zip(best, shares))
            print(f"    head {head + 1}: {pairs}")
            for weight, text in corpus.contexts(layer, best[0], most):
                print(f"      ({weight:.2f}) {text}")


def training_examples(path, sequences):
    """Load `sequences` training examples of a fine-tuned run, evenly spread; None: all.

    Returns the task's name and the Examples.
    """
    checkpoint, vocab = find_weights(path)
    settings = Run(checkpoint.parent).settings()
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run; table takes others with --data NAME")
    print(f"{path}: weights of {checkpoint}")
    with first_rank_first():
        task = find_task(settings["task"])
    examples = load_examples(task, "train", text_tokenizer(vocab), settings["max_len"],
                             settings["doc_stride"])
    return task.name, [examples[n] for n in spread(len(examples), sequences)]


@torch.no_grad()
def count_task_reads(path, examples, device):
    """Count what the model at `path` reads in Examples (see count_reads)."""
    model = load_model(path).to(device).eval()
    lengths = np.array([len(example.ids) for example in examples])
    with count_reads(model) as counts:
        for index in deal_batches(Progress(batches_by_length(lengths, 32), path)):
            batch = pad([examples[n] for n in index])
            model.bert(**to_device(batch, device))
    return counts


def compare_classes(path, sequences, device):
    """Compare the top-1 slots of two classes before and after fine-tuning: records of Figure 4."""
    _, examples = training_examples(path, sequences)
    halves = draw_halves(path, examples)
    start = Run(find_weights(path)[0].parent).settings()["init_checkpoint"]
    records = []
    for when, weights in (("before", start), ("after", path)):
        counts = [count_task_reads(weights, half, device) for half in halves]
        for layer in counts[0]:
            top1 = np.array([half[layer]["top1"] for half in counts])  # (4, n_slots)
            distances = class_distances(top1[2:], top1[:2])
            records.append({"run": path, "when": when, "layer": layer, **distances,
                            "accesses": int(top1.sum()) // 4})
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
    """
    positive = positive / positive.sum(1, keepdims=True)
    negative = negative / negative.sum(1, keepdims=True)
    pairs = {"between": list(itertools.product(positive, negative)),
             "floor": [*itertools.permutations(positive), *itertools.permutations(negative)]}
    distances = {}
    for kind, shares in pairs.items():
        kl = common = 0
        for p, q in shares:
            read = p > 0
            kl += (p[read] * np.log(p[read] / (0.9 * q + 0.1 * p)[read])).sum() / 4
            common += np.minimum(p, q).sum() / 4
        distances[f"kl_{kind}"] = kl
        distances[f"iou_{kind}"] = common / (2 - common)  # the shares of each half sum to 1
    return distances


def draw_halves(path, examples):
    """Draw two halves of class 0, then two of class 1, all of one size: lists of Examples."""
    rng = np.random.default_rng(0)
    labels = np.array([example.label for example in examples])
    classes, counts = np.unique(labels, return_counts=True)
    size = counts.min() // 2
    if len(classes) != 2 or not size:
        raise UserError(f"{path}: expected two classes with two examples or more, found "
                        f"{counts.tolist()} examples")
    halves = []
    for label in classes:
        drawn = [examples[n] for n in rng.permutation(np.flatnonzero(labels == label))]
        halves += [drawn[:size], drawn[size:2 * size]]
    return halves


def page_data(corpus, most):
    """Gather what the page shows, as plain Python. corpus: a CorpusReads.

    most: contexts for a slot.
    """
    ids = corpus.ids
    n_slots = corpus.n_keys**2
    used, text, counts = np.unique(ids, return_inverse=True, return_counts=True)
    text = text.ravel()  # the number of each token's text in `pieces`
    windows = np.pad(ids, ((0, 0), (WIDTH, WIDTH)), constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(windows, 2 * WIDTH + 1, axis=1)
    _, new = np.unique(windows.reshape(ids.size, -1), axis=0, return_index=True)
    layers = []
    for layer, (slots, weights) in corpus.layers.items():
        sums = tally(slots, weights, n_slots)
        heads = slots.shape[1]
        slots = slots.flatten(1).numpy()
        weights = weights.flatten(1).numpy()
        shares = weights / (heads * counts[text])[:, None]  # of all that a token reads
        layers.append({
            "layer": layer,
            "read": sums["read"].tolist(),
            "top1": sums["top1"].tolist(),
            "contexts": strongest(slots[new], new[:, None], weights[new], n_slots, most),
            "tokens": strongest(text[:, None], slots, shares, len(used), SLOTS)})
    return {"seq_len": ids.shape[1],
            "text": text.tolist(),
            "pieces": token_texts(corpus.tokenizer, used.tolist()),
            "layers": layers}


def token_texts(tokenizer, ids):
    """Spell each token, with the space before it."""
    mask = special_ids(tokenizer).mask  # in front, as a decoder drops the first token's space
    start = tokenizer.decode([mask], skip_special_tokens=False)
    texts = tokenizer.decode_batch([[mask, token] for token in ids], skip_special_tokens=False)
    return [text.removeprefix(start) for text in texts]


def strongest(groups, items, weights, n_groups, most):
    """Find the items with the highest sums of weights in each group, at most `most`.

    groups, items and weights broadcast to one entry a read. Returns a list for each group: [item,
    weight in percent, item, ...].
    """
    n_items = int(items.max()) + 1
    pairs, pair = np.unique(groups.astype(int) * n_items + items, return_inverse=True)
    sums = np.bincount(pair.ravel(), weights.ravel())
    group, item = np.divmod(pairs, n_items)
    percent = np.rint(100 * sums).astype(int)
    found = [[] for _ in range(n_groups)]
    for n in np.argsort(-sums, kind="stable"):
        own = found[group[n]]
        if len(own) < 2 * most:
            own += [item[n].item(), percent[n].item()]
    return found


def page_html(data):
    """Make the page from its data. No text of a corpus can end the element that holds them: `<` is
    escaped, and the page sets text only, never HTML."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return template.replace("DATA", text.replace("<", "\\u003c"), 1)
