"""
Read a corpus, cut it into sequences, mask them, and batch them.

Every draw is a function of (seed, stream, place). A resumed run draws the same numbers.
"""
import functools
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import read_json
from lib.tokenizer import Specials

SPLITS = ("train", "val", "test")
MASKED = 0.15  # share of the tokens to predict
ORDER, MASKS, DROPOUT = 1, 2, 3  # streams of random numbers


class Corpus:
    """A prepared corpus, data/<name>/."""

    def __init__(self, name):
        self.name = name
        self.folder = Path("data", name)
        if not self.folder.exists():
            raise UserError(f"{self.folder}: no such corpus: python prepare_data.py --help says "
                            "how to make one")
        self.meta = read_json(self.folder / "meta.json")
        self.vocab_size = self.meta["vocab_size"]
        self.special_ids = Specials(*(self.meta[f"{use}_id"] for use in Specials._fields))

    def split(self, which):
        """Return the ids of 'train', 'val' or 'test': a read-only uint16 array (tokens,)."""
        return np.memmap(self.folder / f"{which}.bin", dtype="<u2", mode="r")

    def enclose(self, rows):
        """Put [CLS] before and [SEP] after each row of ids: int64 (sequences, width + 2)."""
        first = np.full(len(rows), self.special_ids.cls)
        last = np.full(len(rows), self.special_ids.sep)
        return np.column_stack([first, rows, last])


def mask_tokens(ids, rng, corpus):
    """Choose tokens to predict: 80% become [MASK], 10% a random token, 10% stay.

    [UNK] can be chosen, the other special tokens cannot, as in Devlin et al. A random replacement
    is never a special token; in Devlin et al. it can be (our reading). Shapes are static: every
    sequence has round(0.15 * seq_len) positions. A sequence with fewer ordinary tokens has the
    label -100 at the positions left over.
    ids: (batch, seq_len). Returns int64 arrays: ids; positions and labels (batch, masked).
    """
    special_ids = corpus.special_ids
    count = max(1, round(MASKED * ids.shape[1]))
    special = np.isin(ids, [token for token in special_ids if token != special_ids.unk])
    order = rng.random(ids.shape) + special  # special tokens sort behind all others
    positions = np.argpartition(order, count - 1, axis=1)[:, :count]
    positions = np.sort(positions, axis=1)  # (batch, masked)
    original = np.take_along_axis(ids, positions, axis=1).astype(np.int64)
    ordinary = ~np.take_along_axis(special, positions, axis=1)

    random = rng.integers(corpus.vocab_size - len(special_ids), size=original.shape)
    for special_id in sorted(special_ids):  # step over it
        random += random >= special_id
    draw = rng.random(original.shape)
    replacement = np.where(draw < 0.9, random, original)
    replacement = np.where(draw < 0.8, special_ids.mask, replacement)

    inputs = ids.astype(np.int64)
    np.put_along_axis(inputs, positions, np.where(ordinary, replacement, original), axis=1)
    return {"ids": inputs, "positions": positions, "labels": np.where(ordinary, original, -100)}


class MaskedBatches:
    """Make training batches for a masked language model.

    The text is cut into sequences without a gap, across the ends of documents (our reading). Every
    epoch cuts at another offset, and reads the sequences in another order.
    """

    unit = "tokens"
    added = 2  # tokens of a sequence that are not from the text: [CLS] and [SEP]

    def __init__(self, corpus, config):
        self.corpus = corpus
        self.config = config
        self.size = config.accumulation * config.batch_size * config.seq_len  # tokens of a step
        self.tokens = corpus.split("train")
        self.width = config.seq_len - self.added
        self.per_epoch = len(self.tokens) // self.width - 1  # - 1: room for the offset
        if self.per_epoch < 1:
            raise UserError(f"data/{corpus.name}/train.bin: {len(self.tokens)} tokens are too few "
                            f"for sequences of {config.seq_len}: shorter seq_len, or more text")

    def epochs(self, steps):
        """Return how often `steps` steps go through the text."""
        return steps * self.config.accumulation * self.config.batch_size / self.per_epoch

    def get(self, step, micro):
        """Return a micro-batch: arrays ids, positions and labels by name (see mask_tokens)."""
        rng = np.random.default_rng([self.config.seed, MASKS, step, micro])
        text = self.read(step, micro)[:, :-1]
        return mask_tokens(self.corpus.enclose(text), rng, self.corpus)

    def read(self, step, micro):
        """Return the text of a micro-batch, and a token more: int64 (batch, width + 1)."""
        rows = []
        first = (step * self.config.accumulation + micro) * self.config.batch_size
        for number in range(first, first + self.config.batch_size):
            epoch, place = divmod(number, self.per_epoch)
            order, offset = draw_epoch(self.config.seed, epoch, self.per_epoch, self.width)
            start = offset + order[place] * self.width
            rows.append(self.tokens[start:start + self.width + 1])
        return np.array(rows, np.int64)


@functools.lru_cache(maxsize=1)
def draw_epoch(seed, epoch, sequences, width):
    """Draw the order of an epoch's sequences, and the offset of its cuts."""
    rng = np.random.default_rng([seed, ORDER, epoch])
    return rng.permutation(sequences), rng.integers(width)


class CausalBatches(MaskedBatches):
    """Make training batches for a causal language model, as in Lample et al. (2019).

    A sequence is seq_len tokens as they stand in the text. Attention goes across documents.
    """

    added = 0

    def get(self, step, micro):
        """Return a micro-batch: ids and labels (the next tokens), int64 (batch, seq_len)."""
        rows = self.read(step, micro)
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def spread(number, most):
    """Choose `most` of the indices below `number`, spread evenly; all if `most` is None."""
    return np.linspace(0, number - 1, min(most or number, number)).astype(np.int64)


def cut_split(corpus, split, seq_len, sequences=None):
    """Cut a split into full sequences [CLS] + (seq_len - 2) tokens + [SEP]: int64 (n, seq_len).

    sequences: at most this many, spread evenly over the split. UserError if there is none.
    """
    tokens = corpus.split(split)
    width = seq_len - 2
    full = len(tokens) // width
    if not full:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few for one "
                        f"sequence of {seq_len}: shorter seq_len, or more text")
    rows = tokens[:full * width].reshape(full, width)
    return corpus.enclose(rows[spread(full, sequences)])


def masked_heldout(corpus, split, seq_len, batch_size, sequences=None):
    """Return masked batches of a split: a list of dicts (see mask_tokens, and cut_split).

    Without `sequences` the tokens that are left over are a shorter sequence, alone in its batch.
    The masks depend only on the text and the vocabulary.
    """
    rng = np.random.default_rng(0)
    masked = mask_tokens(cut_split(corpus, split, seq_len, sequences), rng, corpus)
    batches = []
    for start in range(0, len(masked["ids"]), batch_size):
        end = start + batch_size
        batches.append({name: array[start:end] for name, array in masked.items()})
    tokens = corpus.split(split)
    left = len(tokens) % (seq_len - 2)
    if sequences is None and left:
        batches.append(mask_tokens(corpus.enclose([tokens[-left:]]), rng, corpus))
    return batches


def causal_heldout(corpus, split, seq_len, batch_size, sequences=None, stride=None):
    """Return causal batches of a split: a list of dicts of ids and labels, int64 (batch, seq_len).

    A label is the next token, or -100 where it does not count. Windows start `stride` tokens apart
    (by default seq_len). The last one starts earlier, to be full. Each token is predicted once, by
    the first window that reaches it. A [SEP] stands before the split. sequences: take at most this
    many windows, spread evenly.
    """
    text = np.append(corpus.special_ids.sep, corpus.split(split)).astype(np.int64)
    last = max(0, len(text) - 1 - seq_len)  # where the last window starts
    starts = np.append(np.arange(0, last, stride or seq_len), last)
    predicted = np.append(0, starts[:-1] + seq_len)  # by the windows before
    offsets = np.arange(min(seq_len, len(text) - 1))
    chosen = spread(len(starts), sequences)
    batches = []
    for first in range(0, len(chosen), batch_size):
        rows = chosen[first:first + batch_size]
        at = starts[rows, None] + offsets  # (batch, seq_len)
        labels = np.where(at >= predicted[rows, None], text[at + 1], -100)
        batches.append({"ids": text[at], "labels": labels})
    return batches
