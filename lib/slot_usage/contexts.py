"""
See the contexts that read a slot, and the slots that a guess reads.

>>> reads = CorpusReads(model, "out/demo_resm_init", "docs", sequences=512)
>>> reads.contexts(layer=2, slot=17, most=3)   # [(0.71, "raises «valueerror» if"), ...]
"""
import numpy as np
import torch

from lib.common.errors import UserError
from lib.common.progress import Progress
from lib.corpus.batches import Corpus, causal_heldout, cut_split
from lib.corpus.vocabulary import load_tokenizer, read_vocab
from lib.slot_usage.counts import watch_reads
from lib.weights.checkpoint import find_weights, read_weights
from lib.weights.run import Run
from model import value_tables

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
