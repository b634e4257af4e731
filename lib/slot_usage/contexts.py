"""
See the contexts that read a slot, and the slots that a guess reads.

>>> reads = CorpusReads(model, "out/demo_resm_init")
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


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on. Weights in Hugging Face layout
    have (number of positions, None)."""
    folder, _ = find_weights(path)
    if (folder / "model.pt").is_file():
        settings = Run(folder.parent).settings(["seq_len", "dataset"])
        return settings["seq_len"], settings["dataset"]
    return read_weights(path)["config"]["max_len"], None


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

    path: the model's run. data: another corpus than the run's. sequences: at most this number.
    Attributes: name (of the corpus), ids (sequences, time) and layers, {layer: (slots, weights)}:
    what the tokens read, arrays (tokens, heads, topk).
    """

    @torch.no_grad()
    def __init__(self, model, path, data=None, sequences=None):
        seq_len, dataset = training_text(path)
        if not (data or dataset):
            raise UserError(f"{path}: its corpus is not known: --data NAME")
        corpus = open_corpus(data or dataset, path)
        self.name, self.tokenizer = corpus.name, load_tokenizer(corpus.folder)
        if model.bert.config.causal:
            batches = causal_heldout(corpus, "test", seq_len, 8, sequences)
            self.ids = np.concatenate([batch["ids"] for batch in batches])
        else:
            self.ids = cut_split(corpus, "test", seq_len, sequences)
        device, reads = model.bert.words.weight.device, {n: [] for n in value_tables(model)}

        def keep(layer, slots, weights):
            reads[layer].append((slots.cpu(), weights.cpu()))

        with watch_reads(model, keep):
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{corpus.name}"):
                model.bert(batch.to(device))
        self.layers = {layer: [torch.cat(tensors).numpy() for tensors in zip(*batches, strict=True)]
                       for layer, batches in reads.items()}

    def contexts(self, layer, slot, most):
        """List the tokens that read a slot with the most weight: [(weight, text)], highest first.
        The weight is summed over the heads. The text has the token in «», with up to 8 tokens on
        either side. There are at most `most`, and no text twice."""
        slots, weights = self.layers[layer]
        where = np.nonzero(slots == slot)
        weight, texts = np.bincount(where[0], weights[where]), {}
        for token in np.argsort(-weight, kind="stable")[:np.count_nonzero(weight)]:
            sequence, at = divmod(token, self.ids.shape[1])
            before, here, after = np.split(self.ids[sequence], [at, at + 1])
            left, middle, right = self.tokenizer.decode_batch(
                [before[-8:], here, after[:8]], skip_special_tokens=False)
            text = f"{left} «{middle.strip()}» {right}".strip()
            texts.setdefault(text, weight[token].item())
            if len(texts) == most:
                break
        return [(weight, text) for text, weight in texts.items()]


def corpus_contexts(model, path, data, sequences, most):
    """Return a function contexts(layer, slot), as CorpusReads has it. Without the run's corpus and
    without `data` it prints a line, and the function returns []."""
    try:
        if value_tables(model):
            reads = CorpusReads(model, path, data, sequences)
            return lambda layer, slot: reads.contexts(layer, slot, most)
    except UserError as error:  # a run can be used without its corpus
        if data:
            raise
        print(f"what else reads the slots is not shown: {error}")
    return lambda layer, slot: []


@torch.no_grad()
def guess_lines(model, tokenizer, ids, position, contexts):
    """Yield the likeliest tokens at one position of a text, as lines to print. Lines on the slots
    read there follow, with what else reads them. ids: the text's, a list. contexts(layer, slot):
    [(weight, text)]."""
    reads = {}
    ids, positions = (torch.tensor([x], device=model.bias.device) for x in (ids, [position]))
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})):
        best = model(ids, positions=positions)[0, 0].softmax(0).topk(5)
    for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        yield f"  {probability:6.1%}  {tokenizer.id_to_token(token)}"
    for layer, (slots, weights) in reads.items():
        slots, weights = slots[position].tolist(), weights[position].tolist()  # (heads, topk)
        yield (f"  layer {layer} read, slot (weight), best 3 of {len(slots[0])} per head; what "
               "else reads the best")
        for head, (of_head, shares) in enumerate(zip(slots, weights, strict=True), 1):
            pairs = zip(of_head[:3], shares[:3], strict=True)
            yield f"    head {head}: {'  '.join(f'{slot} ({share:.2f})' for slot, share in pairs)}"
            for weight, text in contexts(layer, of_head[0]):
                yield f"      ({weight:.2f}) {text}"
