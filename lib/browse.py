"""
Show what a slot knows: the contexts that read it, and the page of measure.py browse.

page_data() gathers what the page shows, and page_html() puts it into browse.html as JSON. Two
layers of 64 x 64 slots read by 32,768 tokens make 1.1 MB. Larger ones want fewer --contexts.
"""
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from lib.corpus import causal_heldout, cut_split
from lib.device import Progress
from lib.errors import UserError
from lib.tokenizer import load_tokenizer, special_ids
from lib.usage import last_used, open_corpus, times_read, training_text, watch_reads
from model import value_tables

WIDTH = 8  # tokens shown on either side; two contexts that agree there count as one
SLOTS = 8  # shown for a word


class CorpusReads:
    """Read the test text of a corpus with a model, nothing masked.

    path: the model's run. data: the corpus, None for the run's. sequences: at most this number.
    Attributes: name and tokenizer of the corpus; ids (sequences, time); n_keys of the model;
    layers {layer: (slots, weights)}, what the tokens read, arrays (tokens, heads, topk).
    """

    @torch.no_grad()
    def __init__(self, model, path, data, sequences):
        seq_len, trained_on = training_text(path)
        reads = {layer: [] for layer in value_tables(model)}
        if not reads:
            raise UserError(f"{path}: a model without memory has no slots")
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
        with watch_reads(model, lambda layer, *read: reads[layer].append(read)):
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{self.name}"):
                model.bert(batch.to(device))
        self.layers = {}
        for layer, batches in reads.items():
            slots, weights = zip(*batches, strict=True)
            self.layers[layer] = torch.cat(slots).numpy(), torch.cat(weights).numpy()

    def contexts(self, layer, slot, most):
        """List the contexts that read a slot with the most weight, at most `most`.

        Returns [(weight, text)]: the sum over the heads, and the text once, with the token in «».
        """
        slots, weights = self.layers[layer]
        where = np.nonzero(slots == slot)
        weight = np.bincount(where[0], weights[where])  # of each token
        texts = {}
        for token in np.argsort(-weight, kind="stable")[:np.count_nonzero(weight)]:
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

    ids: of the text. corpus: a CorpusReads for `most` contexts of each slot, or None.
    """
    reads = {}
    ids = torch.tensor([ids], device=model.bias.device)
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})):
        best = model(ids)[0, position].softmax(0).topk(5)
    for probability, token in zip(best.values.tolist(), best.indices.tolist()):
        print(f"  {probability:6.1%}  {tokenizer.id_to_token(token)}")
    for layer, (slots, weights) in reads.items():
        print(f"  layer {layer} read, slot (weight), best 3 of {slots.shape[-1]} per head; what "
              "else reads the best")
        read = zip(slots[position].tolist(), weights[position].tolist())
        for head, (slots, weights) in enumerate(read, 1):
            best3 = [f"{slot} ({weight:.2f})" for slot, weight in zip(slots[:3], weights)]
            print(f"    head {head}: {'  '.join(best3)}")
            for weight, text in corpus.contexts(layer, slots[0], most):
                print(f"      ({weight:.2f}) {text}")


def page_data(corpus, snapshots, most):
    """Gather what the page shows, as plain Python.

    corpus: a CorpusReads. snapshots: Run.usage_snapshots(), or {}. most: contexts for a slot.
    """
    ids = corpus.ids
    n_slots = corpus.n_keys**2
    used, text = np.unique(ids.ravel(), return_inverse=True)
    pieces = token_texts(corpus.tokenizer, used.tolist())
    words, counts, word = find_words([pieces[i] for i in text], ids.shape[1])
    around = np.pad(ids, ((0, 0), (WIDTH, WIDTH)), constant_values=-1)
    around = np.lib.stride_tricks.sliding_window_view(around, 2 * WIDTH + 1, axis=1)
    _, new = np.unique(around.reshape(ids.size, -1), axis=0, return_index=True)
    layers = []
    for layer, (slots, weights) in corpus.layers.items():
        tokens, heads, _ = slots.shape
        read, top1 = times_read(slots, n_slots)
        slots, weights = slots.reshape(tokens, -1), weights.reshape(tokens, -1)
        share = weights / (heads * counts[word])[:, None]  # of all that a word reads
        layers.append({
            "layer": layer,
            "n_keys": corpus.n_keys,
            "read": read.tolist(),
            "top1": top1.tolist(),
            "last": last_used(snapshots, layer).tolist() if snapshots else [],
            "contexts": strongest(slots[new], new[:, None], weights[new], n_slots, most),
            "words": strongest(word[:, None], slots, share, len(words), SLOTS)})
    return {"seq_len": ids.shape[1], "text": text.tolist(), "pieces": pieces, "words": words,
            "counts": counts.tolist(), "steps": list(snapshots), "layers": layers}


def token_texts(tokenizer, ids):
    """Spell each token, with the space before it."""
    mask = special_ids(tokenizer).mask  # in front, as a decoder drops the first token's space
    pairs = [[mask], *([mask, token] for token in ids)]
    first, *both = tokenizer.decode_batch(pairs, skip_special_tokens=False)
    return [text.removeprefix(first) for text in both]


def find_words(texts, seq_len):
    """Join the tokens of sequences to words. A word goes on where letters or digits follow without
    a space. Returns the words, most frequent first, their counts, and each token's word."""
    spelled, number = [""], []
    for n, text in enumerate(texts):
        goes_on = spelled[-1][-1:].isalnum() and text[:1].isalnum()
        if n % seq_len == 0 or not goes_on:
            spelled.append("")
        spelled[-1] += text
        number.append(len(spelled) - 1)
    spelled = [word.strip() for word in spelled]
    words, counts = zip(*Counter(spelled[1:]).most_common(), strict=True)
    index = {word: n for n, word in enumerate(words)}
    return words, np.array(counts), np.array([index[spelled[n]] for n in number])


def strongest(groups, items, weights, n_groups, most):
    """Find the items with the highest sums of weights in each group, at most `most`.

    groups, items and weights broadcast to one entry a read. Returns a list for each group: [item,
    weight in percent, item, ...].
    """
    n_items = int(items.max()) + 1
    pairs, pair = np.unique(groups.astype(int) * n_items + items, return_inverse=True)
    sums = np.bincount(pair.ravel(), weights.ravel())
    group, item = np.divmod(pairs, n_items)
    ends = np.searchsorted(group, np.arange(1, n_groups))
    found = []
    for own, weight in zip(np.split(item, ends), np.split(sums, ends), strict=True):
        best = np.argsort(-weight, kind="stable")[:most]
        percent = np.rint(100 * weight[best]).astype(int)
        found.append(np.column_stack([own[best], percent]).ravel().tolist())
    return found


def page_html(data):
    """Make the page from its data. No text of a corpus can end the element that holds them: `<` is
    escaped, and the page sets text only, never HTML."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return template.replace("DATA", text.replace("<", "\\u003c"), 1)
