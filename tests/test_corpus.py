"""
Count masks, training batches and held-out batches by hand, on a corpus of random ids.
"""
import json
import math
import types
from pathlib import Path

import numpy as np
import pytest

from lib.corpus import (
    DROPOUT,
    MASKS,
    ORDER,
    Corpus,
    cut_split,
    mask_tokens,
    masked_heldout,
)
from lib.settings import UserError
from lib.tokenizer import Specials
from pretrain import CausalBatches, MaskedBatches, draw_epoch

SIZES = {"train": 1000, "val": 100, "test": 271}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Make data/random: 500 tokens, the first five of them special."""
    monkeypatch.chdir(tmp_path)
    folder, rng = Path("data/random"), np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split, size in SIZES.items():
        rng.integers(5, 500, size).astype("<u2").tofile(folder / f"{split}.bin")
    ids = {f"{use}_id": number for number, use in enumerate(Specials._fields)}
    meta = {"vocab_size": 500, "tokens": SIZES, "sha256": {"train": "a" * 64},
            "documents_sha256": "b" * 64, **ids}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Corpus("random")


def settings(**changed):
    sizes = {"seed": 0, "seq_len": 16, "batch_size": 2, "accumulation": 3}
    return types.SimpleNamespace(**sizes | changed)


def get(batches, step, micro):
    batch, weight = batches.get(step, micro)
    assert weight == 1 / batches.settings.accumulation
    return batch


def unmasked(batch):
    """Return a batch's ids with the labels in their places."""
    ids, positions, labels = batch["ids"].copy(), batch["positions"], batch["labels"]
    labels = np.where(labels == -100, np.take_along_axis(ids, positions, 1), labels)
    np.put_along_axis(ids, positions, labels, 1)
    return ids


def test_masking():
    special, vocab = Specials(0, 100, 101, 102, 103), 1000
    left_out = (0, 101, 102, 103)  # [UNK] can be chosen, but is not drawn
    ids = np.random.default_rng(0).choice(np.setdiff1d(np.arange(vocab), left_out), (2000, 40))
    ids[:, 0], ids[:, 20], ids[:, -1] = 101, 102, 102
    ids[7, 4:] = 0  # three ordinary tokens
    original = ids.copy()
    corpus = types.SimpleNamespace(vocab_size=vocab, special_ids=special)
    batch = mask_tokens(ids, np.random.default_rng(1), corpus)
    inputs, positions, labels = batch["ids"], batch["positions"], batch["labels"]
    assert np.array_equal(ids, original)
    assert positions.shape == labels.shape == (2000, 6)  # 15% of 40
    assert all(len(set(row)) == 6 for row in positions.tolist())
    assert sorted(positions[7][labels[7] != -100].tolist()) == [1, 2, 3]
    at = np.take_along_axis(ids, positions, 1)
    chosen = labels != -100
    n = 1999 * 6 + 3
    assert chosen.sum() == n and np.array_equal(at[chosen], labels[chosen])
    assert not np.isin(at[chosen], left_out).any() and (at[chosen] == 100).any()
    assert np.array_equal(unmasked(batch), ids)
    new = np.take_along_axis(inputs, positions, 1)
    assert np.array_equal(new[~chosen], at[~chosen])
    masked, kept = new[chosen] == special.mask, new[chosen] == at[chosen]
    drawn = new[chosen][~masked & ~kept]
    assert not np.isin(drawn, special).any() and drawn.min() < 20 and 980 < drawn.max() < vocab
    for share, expected in [(masked.mean(), 0.8), (kept.mean(), 0.1), (len(drawn) / n, 0.1)]:
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    small = types.SimpleNamespace(vocab_size=7, special_ids=Specials(0, 1, 2, 3, 4))
    few = mask_tokens(np.full((200, 512), 5), np.random.default_rng(1), small)
    assert few["labels"].shape == (200, 77)  # 15% of 512 is 76.8
    assert set(few["ids"].flat) == {4, 5, 6}  # the last token is drawn too
    counts = np.bincount(positions[chosen], minlength=40)[np.r_[1:20, 21:39]]
    assert abs(counts / (n / 38) - 1).max() < 5 / math.sqrt(n / 38)  # every place alike


def test_a_batch_is_a_function_of_seed_step_and_micro_batch(corpus):
    batches = MaskedBatches(corpus, settings())
    assert batches.size == 3 * 2 * 16  # tokens of a step
    assert batches.epochs(batches.per_epoch) == 3 * 2
    batch = get(batches, 2, 1)
    get(batches, 1000, 0)  # of another epoch
    again = get(batches, 2, 1)
    assert all(np.array_equal(again[name], batch[name]) for name in batch)
    places = [(step, micro) for step in (0, 1) for micro in range(3)]
    assert len({str(get(batches, *place)["positions"]) for place in places}) == 6
    other = get(MaskedBatches(corpus, settings(seed=1)), 2, 1)
    assert not np.array_equal(unmasked(other), unmasked(batch))
    assert not np.array_equal(other["positions"], batch["positions"])
    assert len({ORDER, MASKS, DROPOUT}) == 3  # no two streams draw the same numbers
    # the micro-batches of a step are the sequences of one large batch
    whole = get(MaskedBatches(corpus, settings(batch_size=6, accumulation=1)), 2, 0)
    parts = [unmasked(get(batches, 2, micro)) for micro in range(3)]
    assert np.array_equal(np.concatenate(parts), unmasked(whole))


@pytest.mark.parametrize("objective", [MaskedBatches, CausalBatches])
def test_an_epoch_reads_every_sequence_once(corpus, objective):
    """Read at another offset and in another order than in the epoch before."""
    batches = objective(corpus, settings(batch_size=1, accumulation=1))
    tokens, width = corpus.split("train"), 14 if objective is MaskedBatches else 16
    assert batches.per_epoch == len(tokens) // width - 1
    assert batches.epochs(3 * batches.per_epoch) == 3
    where = {bytes(tokens[at:at + width]): at for at in range(len(tokens) - width + 1)}
    epochs = []
    for epoch in range(2):
        starts = []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch = get(batches, step, 0)
            row = batch["ids"][0]
            if objective is MaskedBatches:
                first, *row, last = unmasked(batch)[0]
                assert (first, last) == (corpus.special_ids.cls, corpus.special_ids.sep)
            starts.append(where[bytes(np.array(row, "<u2"))])
            if objective is CausalBatches:
                following = tokens[starts[-1] + 1:starts[-1] + width + 1]
                assert np.array_equal(batch["labels"][0], following)
        assert set(np.diff(sorted(starts))) == {width} and starts != sorted(starts)
        epochs.append(starts)
    assert min(epochs[0]) != min(epochs[1])
    assert {draw_epoch(0, epoch, 1, 3)[1] for epoch in range(50)} == {0, 1, 2}
    assert np.argsort(epochs[0]).tolist() != np.argsort(epochs[1]).tolist()


def test_too_few_tokens_for_a_sequence(corpus):
    """Leave out one sequence of an epoch, for its offset."""
    assert MaskedBatches(corpus, settings(seq_len=502)).per_epoch == 1
    with pytest.raises(UserError, match="1000 tokens are too few"):
        MaskedBatches(corpus, settings(seq_len=503))
    with pytest.raises(UserError, match="271 tokens are too few"):
        masked_heldout(corpus, "test", 300, 8, sequences=1)


def test_masked_heldout_covers_the_split_once(corpus):
    """Mask 15% of the shorter last sequence, too, whatever the batch size."""
    tokens = corpus.split("test").tolist()
    full, rest = divmod(len(tokens), 14)
    whole = masked_heldout(corpus, "test", 16, 1)
    assert [batch["ids"].shape for batch in whole] == [(1, 16)] * full + [(1, rest + 2)]
    found = []
    for batch in whole:
        ids = unmasked(batch)[0].tolist()
        assert (ids[0], ids[-1]) == (corpus.special_ids.cls, corpus.special_ids.sep)
        found += ids[1:-1]
    assert found == tokens
    assert (whole[-1]["labels"] != -100).sum() == max(1, round(0.15 * (rest + 2)))
    for size in (2, 3, 100):
        batches = masked_heldout(corpus, "test", 16, size)
        assert max(len(batch["ids"]) for batch in batches) == min(size, full)
        for name in ("ids", "positions", "labels"):
            one, same = (np.concatenate([batch[name].flatten() for batch in some])
                         for some in (whole, batches))
            assert np.array_equal(one, same)


def test_few_held_out_sequences_are_spread_evenly(corpus):
    """Take the first, the middle and the last one of a split."""
    whole = cut_split(corpus, "test", 16)
    assert len(whole) == 271 // 14
    some = cut_split(corpus, "test", 16, 3)
    assert np.array_equal(some, whole[[0, (len(whole) - 1) // 2, -1]])
