"""
Read a prepared corpus, cut it into sequences, and mask and batch these.

>>> corpus = Corpus("docs")                         # data/docs, made by prepare_data.py docs
>>> batches = MaskedBatches(corpus, config)         # for training
>>> batches.get(step=0, micro=0)                    # {"ids": ..., "positions": ..., "labels": ...}
>>> masked_heldout(corpus, "val", seq_len=512, batch_size=8)   # for evaluation

A causal language model has CausalBatches and causal_heldout.
"""
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import read_json
from lib.tokenizer import Specials, read_vocab, vocab_facts

SPLITS = ("train", "val", "test")
CORPORA = ("docs", "wikitext2", "wikitext103", "wikipedia", "bookcorpus", "wikibooks", "pg19")
MASKED = 0.15  # share of the tokens to predict


class Corpus:
    """A prepared corpus, data/<name>/. UserError if it is missing, cut short or inconsistent.

    Attributes: name, folder, meta (meta.json as a dict), vocab_size, special_ids (Specials),
    tokenizer_hash. A corpus that is only for measuring (pg19) has no tokens in train and val, and
    meta["unigram_perplexity"] is None.
    """

    def __init__(self, name):
        self.name, self.folder = name, Path("data", name)
        file = self.folder / "meta.json"
        if not file.is_file():
            if name in ("", ".", "..") or "/" in name:
                raise UserError(f"dataset {name!r}: expected a folder's name in data/, no path")
            known = name.removesuffix("_raw") in CORPORA
            command = name.replace("_raw", " --raw") if known else f"text {name} PATH..."
            raise UserError(f"{self.folder}: no such corpus: python prepare_data.py {command}")
        facts = vocab_facts(read_vocab(self.folder))
        self.meta = read_json(file)
        if not (facts.items() <= self.meta.items() and _counts_and_hashes(self.meta)):
            raise UserError(f"{file}: damaged, or made with another vocabulary than the vocab.txt "
                            "beside it: prepare the corpus again")
        self.vocab_size, self.tokenizer_hash = facts["vocab_size"], facts["tokenizer_hash"]
        self.special_ids = Specials(*(facts[f"{use}_id"] for use in Specials._fields))

    def enclose(self, rows):
        """Put [CLS] before and [SEP] after each row of ids: int64 (sequences, width + 2)."""
        return np.column_stack([np.full(len(rows), self.special_ids.cls), rows,
                                np.full(len(rows), self.special_ids.sep)])

    def split(self, which):
        """Return the ids of 'train', 'val' or 'test': a read-only np.memmap of uint16, (tokens,).
        UserError if the file has another size than meta.json says, or an id is outside the
        vocabulary."""
        file, expected = self.folder / f"{which}.bin", 2 * self.meta["tokens"][which]
        size = file.stat().st_size if file.is_file() else 0
        if size != expected:
            raise UserError(f"{file}: expected {expected} bytes, found {size}: prepare it again")
        ids = np.memmap(file, dtype="<u2", mode="r") if size else np.empty(0, "<u2")
        if size and ids.max() >= self.vocab_size:
            at = int((ids >= self.vocab_size).argmax())
            raise UserError(f"{file}: id {ids[at]} at position {at}, but the vocabulary has "
                            f"{self.vocab_size} tokens: prepare it again")
        return ids


def _counts_and_hashes(meta):
    """Tell whether a meta.json has what depends on the text, each in its type."""
    tokens, hashes = meta.get("tokens"), meta.get("sha256")
    return (isinstance(tokens, dict) and all(type(tokens.get(split)) is int for split in SPLITS)
            and isinstance(hashes, dict) and all(type(hashes.get(split)) is str for split in SPLITS)
            and (not tokens["train"] or type(meta.get("unigram_perplexity")) is float))


def mask_tokens(ids, rng, vocab_size, special_ids):
    """Choose tokens to predict: 80% become [MASK], 10% a random token, 10% stay.

    ids: (batch, seq_len) integers. rng: numpy Generator. special_ids: Specials. As in Devlin et
    al., [UNK] can be chosen, the other special tokens cannot. A random replacement is never a
    special token; in Devlin et al. it can be (our reading). Shapes are static: every sequence has
    round(0.15 * seq_len) positions. Where it has fewer ordinary tokens, some labels are -100.
    Returns int64 arrays by name: ids (batch, seq_len), positions and labels (batch, masked).
    """
    count = max(1, round(MASKED * ids.shape[1]))
    special = np.isin(ids, [token for token in special_ids if token != special_ids.unk])
    order = rng.random(ids.shape) + special  # special tokens sort behind all others
    positions = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1).astype(np.int64)
    chosen = ~np.take_along_axis(special, positions, axis=1)
    random = rng.integers(vocab_size - len(special_ids), size=labels.shape)
    for special_id in sorted(special_ids):  # step over it
        random += random >= special_id
    draw = rng.random(labels.shape)
    new = np.where(draw < 0.8, special_ids.mask, np.where(draw < 0.9, random, labels))
    inputs = ids.astype(np.int64)
    np.put_along_axis(inputs, positions, np.where(chosen, new, labels), axis=1)
    labels[~chosen] = -100
    return {"ids": inputs, "positions": positions, "labels": labels}


def tokens_per_step(config):
    """Return the number of tokens of a training step; UserError for an absurd one."""
    tokens = config.accumulation * config.batch_size * config.seq_len
    if tokens > 2**36:
        raise UserError(f"{config.batch_size:,} x {config.accumulation:,} sequences of "
                        f"{config.seq_len} a step: lower batch_size or accumulation")
    return tokens


class MaskedBatches:
    """Make training batches for a masked language model.

    The sequences and masks of a batch depend only on (seed, step, micro-batch). A resumed run needs
    no position in the data. Every epoch cuts the text at another offset, and goes through the
    sequences in another order. config: has seed, seq_len, batch_size and accumulation.
    """

    added = 2  # tokens of a sequence that are not from the text: [CLS] and [SEP]

    def __init__(self, corpus, config):
        self.corpus, self.config, self.width = corpus, config, config.seq_len - self.added
        self.accumulation = config.accumulation
        self.tokens = corpus.split("train")
        self.per_epoch = len(self.tokens) // self.width - 1  # - 1: room for the offset
        if self.per_epoch < 1:
            raise UserError(f"data/{corpus.name}/train.bin: {len(self.tokens)} tokens are too few "
                            f"for sequences of {config.seq_len}: shorter seq_len, or more text")
        self.unit, self.size = "tokens", tokens_per_step(config)
        self.epoch = self.order = self.text = None

    def epochs(self, steps):
        """Return how often `steps` steps go through the text."""
        return steps * self.config.accumulation * self.config.batch_size / self.per_epoch

    def loss_weight(self, step, micro):
        """Return a micro-batch's weight in the mean loss of its step."""
        return 1 / self.accumulation

    def read(self, step, micro, more=0):
        """Return the text of a micro-batch: a list of arrays of `width` + `more` ids."""
        config, width, rows = self.config, self.width, []
        first = (step * config.accumulation + micro) * config.batch_size
        for number in range(first, first + config.batch_size):
            epoch, place = divmod(number, self.per_epoch)
            if epoch != self.epoch:
                rng = np.random.default_rng([config.seed, ORDER, epoch])
                self.order, offset = rng.permutation(self.per_epoch), rng.integers(width)
                self.epoch, self.text = epoch, self.tokens[offset:]
            start = self.order[place] * width
            rows.append(self.text[start:start + width + more])
        return rows

    def get(self, step, micro):
        """Return a micro-batch: arrays ids, positions and labels by name (see mask_tokens)."""
        rng = np.random.default_rng([self.config.seed, MASKS, step, micro])
        ids = self.corpus.enclose(self.read(step, micro))
        return mask_tokens(ids, rng, self.corpus.vocab_size, self.corpus.special_ids)


class CausalBatches(MaskedBatches):
    """Make training batches for a causal language model, as in Lample et al. (2019). A sequence is
    seq_len tokens as they stand in the text. [SEP] stands between documents, and attention goes
    across it."""

    added = 0

    def get(self, step, micro):
        """Return a micro-batch: ids and labels (the next tokens), int64 (batch, seq_len)."""
        rows = np.array(self.read(step, micro, more=1), np.int64)
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def cut_split(corpus, split, seq_len, sequences=None):
    """Cut a split into sequences [CLS] + (seq_len - 2) tokens + [SEP]: int64 (n, seq_len).

    sequences: take at most this many full sequences, spread evenly over the split. By default the
    whole split is cut, and its last sequence is padded.
    """
    tokens, width = corpus.split(split), seq_len - 2
    full = len(tokens) // width
    chosen = np.linspace(0, full - 1, min(sequences or full, full)).astype(np.int64)
    rows, rest = tokens[:full * width].reshape(full, width)[chosen], tokens[full * width:]
    ids = corpus.enclose(rows)
    if sequences is None and len(rest):
        last = corpus.enclose([rest])
        return np.concatenate([ids, np.pad(last, ((0, 0), (0, width - len(rest))),
                                           constant_values=corpus.special_ids.pad)])
    if not full:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few for one "
                        f"sequence of {seq_len}: take a shorter seq_len or more text")
    return ids


def masked_heldout(corpus, split, seq_len, batch_size, sequences=None, masking=0):
    """Return masked batches of a split: dicts of ids, positions, labels (see mask_tokens).

    sequences: see cut_split. A padded last sequence makes a separate batch. This batch also has
    `mask`, True at real tokens; 15% of these are predicted. Which tokens are masked depends only on
    the seed `masking`, the text and the vocabulary.
    """
    ids, rng = cut_split(corpus, split, seq_len, sequences), np.random.default_rng([0, masking])
    real = ids != corpus.special_ids.pad
    full, length = int(real.all(1).sum()), int(real[-1].sum())
    masked = mask_tokens(ids[:full], rng, corpus.vocab_size, corpus.special_ids)
    batches = [{name: array[start:start + batch_size] for name, array in masked.items()}
               for start in range(0, full, batch_size)]
    if length < seq_len:
        last = mask_tokens(ids[-1:, :length], rng, corpus.vocab_size, corpus.special_ids)
        last["ids"] = np.pad(last["ids"], ((0, 0), (0, seq_len - length)),
                             constant_values=corpus.special_ids.pad)
        batches.append({**last, "mask": real[-1:]})
    return batches


def causal_heldout(corpus, split, seq_len, batch_size, sequences=None, stride=None):
    """Return batches of a split for a causal language model: dicts of ids and labels.

    Both are int64 (batch, seq_len). A label is the next token, or -100 where it does not count.
    Sequences start `stride` tokens apart (by default seq_len); the last one starts earlier, to be
    full. Each token is predicted once, by the first sequence that reaches it. Every token is
    predicted from at least seq_len - stride + 1 earlier tokens, except the split's first seq_len. A
    [SEP] stands before the split. sequences: take at most this many, spread evenly.
    """
    text = np.append(corpus.special_ids.sep, corpus.split(split)).astype(np.int64)
    if len(text) == 1:
        raise UserError(f"data/{corpus.name}/{split}.bin: there is no text in it")
    last = max(0, len(text) - 1 - seq_len)  # where the last sequence starts
    starts = np.append(np.arange(0, last, stride or seq_len), last)
    predicted = np.append(0, starts[:-1] + seq_len)  # by the sequences before
    chosen = np.linspace(0, len(starts) - 1, min(sequences or len(starts), len(starts)))
    batches = []
    for rows in np.split(chosen.astype(int), range(batch_size, len(chosen), batch_size)):
        at = starts[rows, None] + np.arange(min(seq_len, len(text) - 1))
        labels = np.where(at >= predicted[rows, None], text[at + 1], -100)
        batches.append({"ids": text[at], "labels": labels})
    return batches


ORDER = 1  # of the training data, by epoch
MASKS = 2  # by step and micro-batch
DROPOUT = 3  # by step and micro-batch
