"""
Read texts with a model to see which slots they read, and show what a slot knows.

measure.py's commands slots, fill, sample and browse use it. page_data() gathers what the page of
browse shows, and page_html() puts it into slots.html as JSON.
"""
import json
from pathlib import Path

import numpy as np
import torch

from lib.corpus import causal_heldout, cut_split
from lib.settings import Progress, UserError
from lib.tokenizer import full_tokenizer, load_tokenizer, special_ids
from lib.usage import record_reads
from lib.weights import find_weights, load_model, open_corpus, read_weights, run_settings
from model import value_tables

SEQUENCES = 512  # read by CorpusReads
WIDTH = 8  # tokens shown on either side; two contexts that agree there count as one


def load_with_tokenizer(path):
    """Load the model that `path` names (see find_weights), in evaluation mode, and its tokenizer.

    Returns (model, tokenizers.Tokenizer). The tokenizer adds [CLS] and [SEP] and pads a batch.
    """
    return load_model(path).eval(), full_tokenizer(find_weights(path)[1])


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on.

    Weights in Hugging Face layout have (number of positions, None).
    """
    folder, _ = find_weights(path)
    settings = run_settings(folder)
    longest = read_weights(folder)["config"].max_len
    return settings.get("seq_len", longest), settings.get("dataset")


def open_model(args):
    """Load a model with its tokenizer, and read a corpus with it.

    args: the command line's run, data, device and seen. Returns (model, tokenizer, CorpusReads).
    The last is None without a memory.
    """
    model, tokenizer = load_with_tokenizer(args.run)
    model.to(args.device)
    corpus = CorpusReads(model, args.run, args.data, args.seen) if value_tables(model) else None
    return model, tokenizer, corpus


class CorpusReads:
    """Read the test text of a corpus with a model, nothing masked, at most SEQUENCES of it.

    path: the model's run. data: the corpus, None for the run's. seen: see open_corpus.
    Attributes: name and tokenizer of the corpus; ids (sequences, time); reads {layer: Reads}.
    """

    @torch.no_grad()
    def __init__(self, model, path, data, seen):
        seq_len, trained_on = training_text(path)
        self.name = data or trained_on
        if not self.name:
            raise UserError(f"{path}: its corpus is not known: --data NAME")
        corpus = open_corpus(self.name, path, seen=seen)
        self.tokenizer = load_tokenizer(corpus.folder)
        if model.bert.config.causal:
            [batch] = causal_heldout(corpus, "test", seq_len, SEQUENCES, SEQUENCES)
            self.ids = batch["ids"]  # the last sequence may overlap the one before
        else:
            self.ids = cut_split(corpus, "test", seq_len, SEQUENCES)
        device = model.bert.words.weight.device
        with record_reads(value_tables(model)) as self.reads:
            for batch in Progress(torch.from_numpy(self.ids).split(8), f"data/{self.name}"):
                model.bert(batch.to(device))

    def contexts(self, layer, slot, most):
        """List the contexts that read a slot with the most weight, at most `most`.

        Returns [(weight, text, token)]. weight is the sum over the heads. text has the token in «»
        and is listed once. token is its place in ids.flat.
        """
        found = {}
        for weight, token in self.reads[layer].contexts(slot):
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


def page_data(corpus, most):
    """Gather what the page shows, as plain Python. corpus: a CorpusReads.

    most: contexts for a slot.
    """
    layers = []
    for layer, reads in corpus.reads.items():
        contexts = [[(token, round(weight, 2))
                     for weight, _, token in corpus.contexts(layer, slot, most)]
                    for slot in range(len(reads.ends))]
        layers.append({"layer": layer, "read": reads.counts["read"].tolist(),
                       "top1": reads.counts["top1"].tolist(), "contexts": contexts})
    used, text = np.unique(corpus.ids, return_inverse=True)
    mask = special_ids(corpus.tokenizer).mask  # in front, as a decoder drops the first space
    start, *pieces = corpus.tokenizer.decode_batch(
        [[mask], *([mask, token] for token in used)], skip_special_tokens=False)
    return {"seq_len": corpus.ids.shape[1],
            "text": text.ravel().tolist(),  # the number of each token in `pieces`
            "pieces": [piece.removeprefix(start) for piece in pieces],
            "layers": layers}


def page_html(data):
    """Make the page from its data.

    No text of a corpus can end the element that holds it: `<` is escaped, and the page sets text
    only, never HTML.
    """
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return template.replace("DATA", text.replace("<", "\\u003c"), 1)


@torch.no_grad()
def continue_text(model, ids, tokens, window, temperature, generator):
    """Continue the list `ids` by sampled tokens, with a causal language model.

    Each is among the 50 likeliest after the last `window` tokens. Temperature 0 takes the
    likeliest.
    """
    ids = list(ids)
    for _ in range(tokens):
        window_ids = torch.tensor([ids[-window:]], device=model.bias.device)
        logits = model(window_ids)[0, -1].cpu()
        best = logits.topk(min(50, len(logits)) if temperature else 1)
        scores = (best.values - best.values[0]).double()  # at most 0, at any temperature
        chances = (scores / (temperature or 1)).softmax(0).float()
        ids.append(best.indices[chances.multinomial(1, generator=generator)].item())
    return ids
