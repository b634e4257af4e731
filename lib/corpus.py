"""
Read a corpus, mask tokens, and batch held-out text. pretrain.py batches the training text.

Every draw is a function of (seed, stream, place). A resumed run draws the same numbers.
"""
from pathlib import Path

import numpy as np

from lib.files import read_json
from lib.settings import UserError
from lib.tokenizer import Specials

SPLITS = ("train", "val", "test")
MASKED = 0.15  # share of the tokens to predict
ORDER, MASKS, DROPOUT = 1, 2, 3  # streams of random numbers


class Corpus:
    """A prepared corpus, data/<name>/."""

    def __init__(self, name):
        self.name = name
        self.folder = Path("data", name)
        if not (self.folder / "train.bin").exists():
            raise UserError(f"{self.folder}: no corpus there: python prepare_data.py --help says "
                            "how to make one")
        self.meta = read_json(self.folder / "meta.json")
        self.vocab_size = self.meta["vocab_size"]
        self.special_ids = Specials(*(self.meta[f"{use}_id"] for use in Specials._fields))
        self.text = {"name": name, "documents": self.meta["documents_sha256"],
                     "train": self.meta["sha256"]["train"]}  # what a run keeps in trained_on

    def split(self, which):
        """Return the ids of 'train', 'val' or 'test': a read-only uint16 array (tokens,)."""
        path, tokens = self.folder / f"{which}.bin", self.meta["tokens"][which]
        if not tokens or path.stat().st_size != 2 * tokens:
            raise UserError(f"{path}: without text, or not whole: prepare it again")
        return np.memmap(path, dtype="<u2", mode="r")

    def enclose(self, rows):
        """Put [CLS] before and [SEP] after each row of ids: int64 (sequences, length + 2)."""
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
    ids, special_ids = ids.astype(np.int64), corpus.special_ids
    count = max(1, round(MASKED * ids.shape[1]))
    special = np.isin(ids, [token for token in special_ids if token != special_ids.unk])
    order = rng.random(ids.shape) + special  # special tokens sort behind all others
    positions = np.argpartition(order, count - 1, axis=1)
    positions = np.sort(positions[:, :count], axis=1)  # (batch, masked)
    original = np.take_along_axis(ids, positions, axis=1)
    left_over = np.take_along_axis(special, positions, axis=1)

    random = rng.integers(corpus.vocab_size - len(special_ids), size=original.shape)
    for special_id in sorted(special_ids):  # step over it
        random += random >= special_id
    draw = rng.random(original.shape) + left_over  # what is left over stays
    replacement = np.where(draw < 0.9, random, original)
    replacement = np.where(draw < 0.8, special_ids.mask, replacement)
    np.put_along_axis(ids, positions, replacement, axis=1)
    return {"ids": ids, "positions": positions, "labels": np.where(left_over, -100, original)}


def spread(number, most):
    """Choose `most` of the indices below `number`, spread evenly; all if `most` is None."""
    return np.linspace(0, number - 1, min(most or number, number)).astype(np.int64)


def cut_split(corpus, split, seq_len, sequences=None):
    """Cut a split into full sequences [CLS] + (seq_len - 2) tokens + [SEP]: int64 (n, seq_len).

    sequences: at most this many, spread evenly over the split. UserError if there is none.
    """
    tokens = corpus.split(split)
    length = seq_len - 2
    full = len(tokens) // length
    if not full:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few: "
                        f"shorter seq_len than {seq_len}, or more text")
    rows = tokens[:full * length].reshape(full, length)
    return corpus.enclose(rows[spread(full, sequences)])


def masked_heldout(corpus, split, seq_len, batch_size, sequences=None):
    """Return masked batches of a split: a list of dicts (see mask_tokens, and cut_split).

    Without `sequences` the tokens that are left over are a shorter sequence, alone in its batch.
    The masks depend only on the text and the vocabulary.
    """
    rng = np.random.default_rng(0)
    masked = mask_tokens(cut_split(corpus, split, seq_len, sequences), rng, corpus)
    batches = list(cut_batches(masked, batch_size))
    tokens = corpus.split(split)
    left = len(tokens) % (seq_len - 2)
    if sequences is None and left:
        batches.append(mask_tokens(corpus.enclose([tokens[-left:]]), rng, corpus))
    return batches


def causal_heldout(corpus, split, seq_len, batch_size, sequences=None, stride=None):
    """Return causal batches of a split: a list of dicts of ids and labels, int64 (batch, seq_len).

    A label is the next token, or -100 where it does not count. Windows start `stride` tokens apart
    (by default seq_len). The last one shifts left to be full. A token is scored once, in the first
    window that has it. A [SEP] stands before the split. sequences: take at most this many windows,
    spread evenly.
    """
    text = np.append(corpus.special_ids.sep, corpus.split(split)).astype(np.int64)
    last = max(0, len(text) - 1 - seq_len)  # where the last window starts
    starts = np.append(np.arange(0, last, stride or seq_len), last)
    predicted = np.append(0, starts[:-1] + seq_len)  # by the windows before
    offsets = np.arange(min(seq_len, len(text) - 1))
    rows = spread(len(starts), sequences)
    at = starts[rows, None] + offsets  # (windows, seq_len)
    labels = np.where(at >= predicted[rows, None], text[at + 1], -100)
    return list(cut_batches({"ids": text[at], "labels": labels}, batch_size))


def cut_batches(arrays, size):
    """Yield batches of {name: array}, `size` rows of each array at a time."""
    for start in range(0, len(arrays["ids"]), size):
        yield {name: array[start:start + size] for name, array in arrays.items()}
