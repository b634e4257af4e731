"""
Encode texts as examples, group them by length, and pad them to batches.

>>> examples = encode_examples(tokenizer, texts, labels, max_len=128)
>>> batch = examples.pad(batches_by_length(examples.lengths, 32)[0])
"""
from dataclasses import dataclass

import numpy as np

from lib.corpus.vocabulary import special_ids, tokenize


@dataclass
class Examples:
    """Inputs of a model: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""
    ids: list  # token ids of each example, uint16 (length,)
    first_length: np.ndarray  # (n,) length of [CLS] a [SEP], which has token type 0
    labels: np.ndarray | None  # (n,) classes or scores; (n, 2) first and last token for SQuAD
    pad_id: int

    def __post_init__(self):
        self.lengths = np.array([len(ids) for ids in self.ids])

    def pad(self, index, device="cpu"):
        """Pad the examples `index` to the longest. Returns arrays (batch, time): ids, token_types
        and, if anything is padded, a mask that is True at real tokens."""
        multiple = 8 if str(device).startswith("cuda") else 1  # for tensor cores
        lengths = self.lengths[index][:, None]
        position = np.arange(-(-lengths.max(initial=1) // multiple) * multiple)
        mask = position < lengths
        ids = np.full(mask.shape, self.pad_id, np.int64)
        ids[mask] = np.concatenate([ids[:0, 0], *(self.ids[n] for n in index)])
        after = position >= self.first_length[index][:, None]
        batch = {"ids": ids, "token_types": after.astype(np.int64)}
        return batch if mask.all() else {**batch, "mask": mask}  # faster without a mask


def encode_examples(tokenizer, texts, labels, max_len, what="encoding"):
    """Encode tuples of one or two texts as Examples. The longer of two texts loses its last token
    until there are max_len tokens (Devlin et al.)."""
    special = special_ids(tokenizer)
    encodings = tokenize(tokenizer, [text for row in texts for text in row], what)
    ids, first_length = [], []
    for row in texts:
        pieces = [next(encodings).ids for _ in row]
        while sum(map(len, pieces)) > max_len - 1 - len(pieces):
            max(reversed(pieces), key=len).pop()  # the second, if both are equally long
        joined = [token for piece in pieces for token in [*piece, special.sep]]
        ids.append(np.array([special.cls, *joined], np.uint16))
        first_length.append(len(pieces[0]) + 2)
    return Examples(ids, np.array(first_length), labels, special.pad)


def batches_by_length(lengths, size, rng=None):
    """Group examples of similar lengths into batches, as arrays of indices. Without a numpy
    Generator they are sorted. With one they are in random order, sorted within 64 at a time."""
    n = len(lengths)
    order, bucket = (np.arange(n), n) if rng is None else (rng.permutation(n), 64 * size)
    order = order[np.lexsort((lengths[order], np.arange(n) // bucket))]
    batches = np.split(order, range(size, n, size))
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]
