"""
Find the contexts that read a slot.
"""
import numpy as np
import torch

from lib.common.errors import UserError
from lib.common.progress import Progress
from lib.corpus.batches import Corpus, causal_heldout, cut_split
from lib.corpus.vocabulary import read_vocab
from lib.slot_usage.counts import watch_reads
from lib.training.run import read_settings
from lib.weights.checkpoint import find_weights, read_weights
from model import value_tables


def trained_on(path):
    """(sequence length, corpus) that a model was trained on; of weights in Hugging Face layout
    (number of positions, None)."""
    folder, _ = find_weights(path)
    if (folder / "model.pt").is_file():
        settings = read_settings(folder.parent, ["seq_len", "dataset"])
        return settings["seq_len"], settings["dataset"]
    return read_weights(path)["config"]["max_len"], None


def open_corpus(name, path):
    """The corpus data/<name>; UserError if the model of `path` has another vocabulary."""
    corpus, (_, vocab) = Corpus(name), find_weights(path)
    if read_vocab(corpus.folder) != read_vocab(vocab):
        raise UserError(f"{path} has another vocabulary than data/{name}: prepare the corpus with "
                        f"--vocab {vocab}, or leave one of them out")
    return corpus


@torch.no_grad()
def read_corpus(args, model):
    """What the memories of a model read in the test text of a corpus with nothing masked. Returns
    the corpus, the token ids (sequences, time), of these tokens {layer: (slots, weights)}, (tokens,
    heads, topk) both, and a function: of a layer's slot, contexts(layer, slot) are the tokens that
    read it with the most weight, summed over the heads: [(weight, text with the token marked)], at
    most args.contexts, no text twice."""
    seq_len, dataset = trained_on(args.run)
    if not (args.data or dataset):
        raise UserError(f"{args.run}: its corpus is not known: --data NAME")
    corpus = open_corpus(args.data or dataset, args.run)
    tokenizer = corpus.tokenizer()
    if model.bert.config.causal:
        batches = causal_heldout(corpus, "test", seq_len, 8, args.sequences)
        ids = np.concatenate([batch["ids"] for batch in batches])
    else:
        ids = cut_split(corpus, "test", seq_len, args.sequences)
    device, reads = model.bert.words.weight.device, {n: [] for n in value_tables(model)}
    with watch_reads(model, lambda n, *read: reads[n].append([part.cpu() for part in read])):
        for batch in Progress(torch.from_numpy(ids).split(8), f"data/{corpus.name}"):
            model.bert(batch.to(device))
    for n, batches in reads.items():
        reads[n] = [torch.cat(parts).numpy() for parts in zip(*batches, strict=True)]

    def contexts(layer, slot):
        slots, weights = reads[layer]
        where = np.nonzero(slots == slot)
        weight, texts = np.bincount(where[0], weights[where]), {}
        for token in np.argsort(-weight, kind="stable")[:np.count_nonzero(weight)]:
            sequence, at = divmod(token, ids.shape[1])
            before, here, after = np.split(ids[sequence], [at, at + 1])
            left, middle, right = tokenizer.decode_batch(
                [before[-8:], here, after[:8]], skip_special_tokens=False)
            text = f"{left} «{middle.strip()}» {right}".strip()
            texts.setdefault(text, weight[token].item())
            if len(texts) == args.contexts:
                break
        return [(weight, text) for text, weight in texts.items()]
    return corpus, ids, reads, contexts
