"""
Token ids: a prepared corpus, cut into sequences, masked, in batches.

>>> corpus = Corpus("docs")                         # data/docs, made by prepare_data.py docs
>>> batches = MaskedBatches(corpus, config)         # for training
>>> batches.get(step=0, micro=0)                    # {"ids": ..., "positions": ..., "labels": ...}
>>> heldout(corpus, "val", seq_len=512, batch_size=8)   # for evaluation
CausalBatches and next_tokens are the same for a causal language model.
"""
import json
from pathlib import Path

import numpy as np

from lib.common.errors import UserError
from lib.corpus.vocabulary import IDS, load_tokenizer, read_vocab, vocab_facts

SPLITS = ("train", "val", "test")
CORPORA = ("docs", "wikitext2", "wikitext103", "wikipedia", "bookcorpus", "wikibooks", "pg19")
READ_AT_ONCE = 2**21  # ids
MASKED = 0.15  # share of the tokens to predict


class Corpus:
    """A prepared corpus: data/<name>/. UserError when it is missing, cut short or inconsistent.

    Attributes: name, meta (meta.json as a dict), vocab_size, pad_id, unk_id, cls_id, sep_id,
    mask_id, special_ids (the tuple of those five), tokenizer_hash. A corpus that is only for
    measuring (pg19) has no train and val tokens, and no unigram_perplexity in its meta.
    """

    def __init__(self, name, root="data"):
        self.name, self.folder = name, Path(root, name)
        file = self.folder / "meta.json"
        if not file.is_file():
            known = name.removesuffix("_raw") in CORPORA
            command = name.replace("_raw", " --raw") if known else f"text {name} PATH..."
            raise UserError(f"{self.folder}: no such corpus: python prepare_data.py {command}")
        facts = vocab_facts(read_vocab(self.folder))
        try:
            self.meta = json.loads(file.read_text(encoding="utf-8"))
            tokens = [self.meta["tokens"][split] for split in SPLITS]
            whole = facts.items() <= self.meta.items() and min(tokens) >= 0 < max(tokens)
            whole = whole and (min(tokens) == 0 or self.meta["unigram_perplexity"] > 0)
        except (ValueError, LookupError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise UserError(f"{file}: damaged, or not of the vocab.txt beside it (which hashes to "
                            f"{facts['tokenizer_hash'][:12]}): prepare the corpus again")
        self.vocab_size, self.tokenizer_hash = facts["vocab_size"], facts["tokenizer_hash"]
        self.special_ids = tuple(facts[key] for key in IDS)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids

    def tokenizer(self):
        return load_tokenizer(self.folder)

    def enclose(self, rows):
        """Token ids (sequences, width) as sequences: int64, each [CLS] + its ids + [SEP]."""
        return np.column_stack([np.full(len(rows), self.cls_id), rows,
                                np.full(len(rows), self.sep_id)])

    def split(self, which):
        """Token ids of split 'train', 'val' or 'test': a read-only np.memmap of uint16, (tokens,).
        UserError when the file's size is not meta.json's or an id is outside the vocabulary."""
        file, expected = self.folder / f"{which}.bin", 2 * self.meta["tokens"][which]
        size = file.stat().st_size if file.is_file() else 0
        if size != expected:
            raise UserError(f"{file}: expected {expected} bytes, found {size}: prepare it again")
        ids = np.memmap(file, dtype="<u2", mode="r") if size else np.empty(0, "<u2")
        for at in range(0, len(ids), READ_AT_ONCE):
            outside = ids[at:at + READ_AT_ONCE] >= self.vocab_size
            if outside.any():
                at += int(outside.argmax())
                raise UserError(f"{file}: id {ids[at]} at position {at}, but the vocabulary has "
                                f"{self.vocab_size} tokens: prepare it again")
        return ids


def mask_tokens(ids, rng, vocab_size, special_ids, mask_id):
    """Choose tokens to predict: of 100, 80 become [MASK], 10 a random token, 10 stay.

    ids: (batch, seq_len) integers; rng: numpy Generator. As in Devlin et al., no special token but
    [UNK] is chosen; none is drawn (our reading: theirs can be). Every sequence has as many positions,
    round(0.15 * seq_len): shapes are static. Where there are too few tokens, labels are -100.
    Returns int64 arrays by name: ids (batch, seq_len), positions and labels (batch, masked).
    """
    count = max(1, round(MASKED * ids.shape[1]))
    special = np.isin(ids, special_ids[:1] + special_ids[2:])  # all but [UNK]
    order = rng.random(ids.shape) + special  # special tokens sort behind all others
    positions = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1).astype(np.int64)
    chosen = ~np.take_along_axis(special, positions, axis=1)
    random = rng.integers(vocab_size - len(special_ids), size=labels.shape)
    for number in sorted(special_ids):  # step over them, one by one
        random += random >= number
    draw = rng.random(labels.shape)
    new = np.where(draw < 0.8, mask_id, np.where(draw < 0.9, random, labels))
    inputs = ids.astype(np.int64)
    np.put_along_axis(inputs, positions, np.where(chosen, new, labels), axis=1)
    labels[~chosen] = -100
    return {"ids": inputs, "positions": positions, "labels": labels}


class MaskedBatches:
    """Training batches: which sequences, in which order, masked where, is a function of
    (seed, step, micro-batch), so a resumed run needs no data position. Every epoch cuts the text
    at another offset and goes through its sequences in another order.

    config: has seed, seq_len, batch_size and accumulation.
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
        self.unit = "tokens"
        self.size = config.accumulation * config.batch_size * config.seq_len  # tokens a step
        self.epoch = self.order = self.text = None

    def epochs(self, steps):
        return steps * self.config.accumulation * self.config.batch_size / self.per_epoch

    def share(self, step, micro):
        return 1 / self.accumulation

    def read(self, step, micro, more=0):
        """The text of a micro-batch's sequences: a list of arrays of `width` tokens, and of so many
        more that follow."""
        config, width, rows = self.config, self.width, []
        first = (step * config.accumulation + micro) * config.batch_size
        for number in range(first, first + config.batch_size):
            epoch, i = divmod(number, self.per_epoch)
            if epoch != self.epoch:
                rng = np.random.default_rng([config.seed, 1, epoch])
                self.order, offset = rng.permutation(self.per_epoch), rng.integers(width)
                self.epoch, self.text = epoch, self.tokens[offset:]
            start = self.order[i] * width
            rows.append(self.text[start:start + width + more])
        return rows

    def get(self, step, micro):
        """A micro-batch: arrays ids, positions and labels (see mask_tokens), by name."""
        corpus, rows = self.corpus, self.read(step, micro)
        rng = np.random.default_rng([self.config.seed, 2, step, micro])
        return mask_tokens(corpus.enclose(rows), rng, corpus.vocab_size, corpus.special_ids,
                           corpus.mask_id)


class CausalBatches(MaskedBatches):
    """The same for a causal language model: a sequence is seq_len tokens as they stand in the text,
    with [SEP] between documents and attention across them, as in Lample et al. (2019)."""

    added = 0

    def get(self, step, micro):
        """A micro-batch: int64 (batch, seq_len) ids, and labels, of each the token after it."""
        rows = np.array(self.read(step, micro, more=1), np.int64)
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def cut_split(corpus, split, seq_len, sequences=None):
    """A split in sequences, int64 (sequences, seq_len), each [CLS] + (seq_len - 2) tokens + [SEP]:
    all of it, the last one padded, or at most `sequences` full ones, evenly spread over it."""
    tokens, width = corpus.split(split), seq_len - 2
    full = len(tokens) // width
    chosen = np.linspace(0, full - 1, min(sequences or full, full)).astype(np.int64)
    rows, rest = tokens[:full * width].reshape(full, width)[chosen], tokens[full * width:]
    ids = corpus.enclose(rows)
    if sequences is None and len(rest):
        last = corpus.enclose([rest])
        return np.concatenate([ids, np.pad(last, ((0, 0), (0, width - len(rest))),
                                           constant_values=corpus.pad_id)])
    if not full:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few for one "
                        f"sequence of {seq_len}: take a shorter seq_len or more text")
    return ids


def masked_heldout(corpus, split, seq_len, batch_size, sequences=None, masking=0):
    """Masked batches of a split that is cut by cut(): a list of dicts of arrays ids, positions,
    labels, as mask_tokens makes them, and of the padded last sequence also `mask`, True at real
    tokens. What is masked depends on the seed `masking`, the text and the vocabulary only."""
    def draw(ids):
        return mask_tokens(ids, rng, corpus.vocab_size, corpus.special_ids, corpus.mask_id)

    ids, rng = cut_split(corpus, split, seq_len, sequences), np.random.default_rng([0, masking])
    real = ids != corpus.pad_id
    full, length = int(real.all(1).sum()), int(real[-1].sum())
    drawn = draw(ids[:full])
    batches = [{name: part[at:at + batch_size] for name, part in drawn.items()}
               for at in range(0, full, batch_size)]
    if length < seq_len:  # 15% of its own tokens are masked, then it is padded
        last = draw(ids[-1:, :length])
        last["ids"] = np.pad(last["ids"], ((0, 0), (0, seq_len - length)),
                             constant_values=corpus.pad_id)
        batches.append({**last, "mask": real[-1:]})
    return batches


def causal_heldout(corpus, split, seq_len, batch_size, sequences=None, stride=None):
    """Batches of a split for a causal language model: a list of dicts of ids and labels, int64
    (batch, seq_len). A label is the token after, or -100 where it does not count.

    A sequence starts `stride` tokens after the one before it (by default seq_len), the last one
    early enough to be full. Each predicts what those before it did not: every token of the split is
    predicted once, from at least seq_len - stride + 1 tokens, but for the split's first seq_len,
    before which stands a [SEP]. sequences: at most so many, evenly spread.
    """
    text = np.append(corpus.sep_id, corpus.split(split)).astype(np.int64)
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
