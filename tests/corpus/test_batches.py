"""
Vocabularies, a corpus, its training batches, its held-out text, and masks.
"""
import dataclasses
import hashlib
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import pretrain
from lib import tokenizer as vocabulary
from lib.corpus import (
    Corpus,
    MaskedBatches,
    causal_heldout,
    cut_split,
    mask_tokens,
    masked_heldout,
)
from lib.errors import UserError
from lib.tokenizer import (
    GPT2_SPECIALS,
    Specials,
    full_tokenizer,
    load_tokenizer,
    read_vocab,
    special_ids,
    text_tokenizer,
)
from tests.helpers import PIECES, SHARED, TINY, byte_level_bpe, prepare_sample, texts_of

TRICKY = ["Café déjà-vu, naïve!", "北京 is 中文 and かな", "don't  e.g. U.S.A.\t(x_1) <unk> @-@",
          "unaffable supercalifragilistic" * 5, "a [MASK] b", "\u00ad soft\u200b, \ufeffBOM ½ ﬁ Ⅷ",
          "İstanbul ẞ ǅ", "नमस्ते 😀 ok", "x\u0000y \x07"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no BERT vocabulary on this machine")
def test_ids_are_hugging_faces():
    """Against Hugging Face's tokenizer in plain Python, which shares no code with `tokenizers`."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    vocabulary = SHARED / "bert-vocab/vocab.txt"
    theirs = legacy.BertTokenizerLegacy(str(vocabulary))
    ours = load_tokenizer(vocabulary)
    for text in TRICKY:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.skipif(not SHARED.is_dir(), reason="no BERT vocabulary on this machine")
def test_ids_of_bert():
    """Ids as BERT's published vocabulary numbers them."""
    tokenizer = load_tokenizer(SHARED / "bert-vocab/vocab.txt")
    assert tokenizer.encode("Hello, [MASK] WORLD").ids == [7592, 1010, 103, 2088]
    assert tokenizer.encode("Café 北京").tokens == ["cafe", "北", "京"]
    assert tokenizer.encode("embeddings").tokens == ["em", "##bed", "##ding", "##s"]
    assert tokenizer.decode(tokenizer.encode("embeddings").ids) == "embeddings"


def test_ids_of_gpt2(workdir, gpt2_files):
    reference = byte_level_bpe(gpt2_files)
    vocab = vocabulary.gpt2_vocab()
    ids = json.loads((gpt2_files / "encoder.json").read_text())
    assert dict(zip(vocab, range(50257))) == ids
    assert vocab[50257:] == ["<s>", "</s>", "<pad>", "<mask>"]
    lines = (gpt2_files / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    numbers = {token: number for number, token in enumerate(vocab)}
    assert vocabulary._merges(numbers) == [tuple(line.split()) for line in lines if line]
    with open(SHARED / "wikipedia.txt", encoding="utf-8") as file:
        texts = [*TRICKY, "  two  spaces\n\n\ttabs \r\n", *itertools.islice(file, 3000)]
    Path("vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="tokenizer.json: no tokenizer"):
        load_tokenizer("vocab.txt")
    vocabulary.write_vocab(Path(), vocab)
    ours = [encoding.ids for encoding in text_tokenizer("vocab.txt").encode_batch_fast(texts)]
    assert ours == [encoding.ids for encoding in reference.encode_batch(texts)]
    tokenizer = load_tokenizer("vocab.txt")
    assert [encoding.ids for encoding in tokenizer.encode_batch(texts)] == ours
    text = "a </s> b<mask>"  # special tokens in a text are text
    assert text_tokenizer("vocab.txt").encode(text).ids == reference.encode(text).ids
    assert tokenizer.decode(ours[-1]) == texts[-1]
    marked = tokenizer.encode("<s>a <mask> b</s>").ids  # the mask has the space before it
    assert [vocab[i] for i in marked] == ["<s>", "a", "<mask>", "\u0120b", "</s>"]


def test_a_line_of_a_vocabulary_is_a_token(workdir):
    """Whatever white space is in it."""
    vocab = [*PIECES, "a b", "\u3000", "\u2028", "\x85c", "d\t"]
    Path("vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    assert read_vocab("vocab.txt") == vocab


def test_special_tokens_in_a_text_and_around_it(workdir):
    pad, unk, cls, sep, mask = range(5)
    assert load_tokenizer("vocab.txt").encode("the [SEP] [MASK]").ids == [5, sep, mask]
    assert text_tokenizer("vocab.txt").encode("the [SEP]").ids == [5, unk, unk, unk]
    tokenizer = full_tokenizer("vocab.txt")
    pair, short = tokenizer.encode_batch([("the [MASK]", "cat"), ("sat", "the")])
    assert pair.ids == [cls, 5, mask, sep, 6, sep] and pair.type_ids == [0, 0, 0, 0, 1, 1]
    assert short.ids == [cls, 7, sep, 5, sep, pad] and short.attention_mask == [1] * 5 + [0]
    assert special_ids(tokenizer) == Specials(pad, unk, cls, sep, mask)


def test_prepared_corpus(workdir, capsys):
    prepare_sample()
    corpus = Corpus("sample")
    # four documents: every fourth but one is for val, every fourth for test
    assert texts_of(corpus, "train") == ["the cat sat . the mat ##s", "[UNK] cat ."]
    # [SEP] in a text is text: "[", "sep", "]"
    assert texts_of(corpus, "val") == ["the mat . [UNK] [UNK] [UNK]"]
    assert texts_of(corpus, "test") == ["sat sat"]
    assert Path("data/sample/test.bin").read_bytes() == bytes([7, 0, 7, 0, 3, 0])
    assert corpus.split("test").dtype == np.uint16
    assert corpus.special_ids == (0, 1, 2, 3, 4) and corpus.special_ids.mask == 4
    assert corpus.vocab_size == 11
    assert corpus.tokenizer_hash == hashlib.sha256("\n".join(PIECES).encode()).hexdigest()
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["unknown"] == {"train": 1, "val": 3, "test": 0}
    assert corpus.meta["tokens"] == {"train": 12, "val": 7, "test": 3}
    assert "1 documents, 3 tokens" in capsys.readouterr().out
    assert load_tokenizer(corpus.folder).encode("The [MASK] sat").ids == [5, 4, 7]
    assert sorted(os.listdir("data")) == ["sample"]


def test_masking():
    special, vocab = Specials(0, 100, 101, 102, 103), 1000
    left_out = (0, 101, 102, 103)  # [UNK] can be chosen, but is not drawn
    ids = np.random.default_rng(0).choice(np.setdiff1d(np.arange(vocab), left_out), (2000, 40))
    ids[:, 0], ids[:, 20], ids[:, -1] = 101, 102, 102
    ids[7, 4:] = 0  # three ordinary tokens
    original = ids.copy()
    batch = mask_tokens(ids, np.random.default_rng(1), vocab, special)
    inputs, positions, labels = (batch[name] for name in ("ids", "positions", "labels"))
    assert np.array_equal(ids, original)
    assert positions.shape == labels.shape == (2000, 6)  # 15% of 40
    assert all(len(set(row)) == 6 for row in positions.tolist())
    at = np.take_along_axis(ids, positions, 1)
    assert sorted(positions[7][labels[7] != -100].tolist()) == [1, 2, 3]
    assert (labels[7] == -100).sum() == 3
    chosen = labels != -100
    assert chosen.sum() == 1999 * 6 + 3
    assert np.array_equal(at[chosen], labels[chosen])
    assert not np.isin(at[chosen], left_out).any() and (at[chosen] == 100).any()
    untouched = np.ones_like(ids, bool)
    np.put_along_axis(untouched, positions, ~chosen, 1)
    assert np.array_equal(inputs[untouched], ids[untouched])
    new = np.take_along_axis(inputs, positions, 1)[chosen]
    masked, kept = new == special.mask, new == at[chosen]
    drawn = new[~masked & ~kept]
    assert not np.isin(drawn, special).any() and drawn.min() < 20 and 980 < drawn.max() < vocab
    n = chosen.sum()
    for share, expected in [(masked.mean(), 0.8), (kept.mean(), 0.1), (len(drawn) / n, 0.1)]:
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    counts = np.bincount(positions[chosen], minlength=40)[np.r_[1:20, 21:39]]
    assert abs(counts / (n / 38) - 1).max() < 5 / math.sqrt(n / 38)  # every place alike
    again = mask_tokens(ids, np.random.default_rng(1), vocab, special)
    other = mask_tokens(ids, np.random.default_rng(2), vocab, special)
    assert np.array_equal(again["ids"], inputs)
    assert not np.array_equal(other["positions"], positions)


def unmasked(batch):
    """A batch's ids with the labels in their places."""
    ids, positions, labels = (batch[name] for name in ("ids", "positions", "labels"))
    labels = np.where(labels == -100, np.take_along_axis(ids, positions, 1), labels)
    ids = ids.copy()
    np.put_along_axis(ids, positions, labels, 1)
    return ids


def test_heldout_covers_the_split_once(place):
    """Whatever the batch size; the last sequence is padded, and 15% of its own tokens masked."""
    corpus = Corpus("tiny")
    tokens = corpus.split("test").tolist()
    full, rest = divmod(len(tokens), 14)
    assert full > 3 and rest > 2
    whole = masked_heldout(corpus, "test", 16, 1)
    assert all("mask" not in batch for batch in whole[:-1]) and len(whole) == full + 1
    assert whole[-1]["mask"].tolist() == [[True] * (rest + 2) + [False] * (14 - rest)]
    found, changed = [], 0
    for batch in whole:
        ids = unmasked(batch)
        assert ids.shape == (1, 16)
        changed += (ids != batch["ids"]).sum()
        ids = ids[batch.get("mask", np.full(ids.shape, True))].tolist()
        assert ids[0] == corpus.special_ids.cls and ids[-1] == corpus.special_ids.sep
        found += ids[1:-1]
    assert found == tokens and changed > full  # 2 a sequence, of which a tenth stays
    for size in (2, 3, 100):
        batches = masked_heldout(corpus, "test", 16, size)
        assert all(len(batch["ids"]) <= size for batch in batches)
        for name in ("ids", "positions", "labels"):
            one, same = (np.concatenate([batch[name].flatten() for batch in some])
                         for some in (whole, batches))
            assert np.array_equal(one, same)
    other = masked_heldout(corpus, "test", 16, 100, masking=1)
    assert not np.array_equal(other[0]["positions"], batches[0]["positions"])
    some = masked_heldout(corpus, "test", 16, 100, sequences=3)
    assert len(some) == 1 and some[0]["ids"].shape == (3, 16)
    for length in range(16, 60):
        last = masked_heldout(corpus, "test", length, 8)[-1]
        if "mask" in last:
            ids, mask = last["ids"], last["mask"]
            assert np.array_equal(ids != corpus.special_ids.pad, mask)
            assert (last["labels"] != -100).sum() == max(1, round(0.15 * mask.sum()))
    short = masked_heldout(corpus, "test", len(tokens) + 4, 8)  # less than one sequence
    assert len(short) == 1 and short[0]["mask"].sum() == len(tokens) + 2
    with pytest.raises(UserError, match="too few"):
        masked_heldout(corpus, "test", len(tokens) + 4, 8, sequences=1)


def test_too_few_tokens_for_a_sequence(place):
    """One sequence more than an epoch has, for its offset."""
    corpus = Corpus("tiny")
    config, tokens = pretrain.Config(**TINY), len(corpus.split("train"))
    for seq_len, enough in ((tokens // 2 + 2, True), (tokens // 2 + 3, False), (tokens, False)):
        changed = dataclasses.replace(config, seq_len=seq_len)
        if enough:
            assert MaskedBatches(corpus, changed).per_epoch == 1
        else:
            with pytest.raises(UserError, match="too few"):
                MaskedBatches(corpus, changed)


def test_few_held_out_sequences_are_spread_evenly(place):
    """The first, the middle and the last one of a split, for either objective."""
    corpus = Corpus("tiny")
    whole = cut_split(corpus, "test", 16)[:len(corpus.split("test")) // 14]
    assert np.array_equal(cut_split(corpus, "test", 16, 3), whole[[0, (len(whole) - 1) // 2, -1]])
    [batch] = causal_heldout(corpus, "test", 16, 1000)
    [some] = causal_heldout(corpus, "test", 16, 1000, sequences=3)
    chosen = [0, (len(batch["ids"]) - 1) // 2, -1]
    assert all(np.array_equal(some[name], batch[name][chosen]) for name in ("ids", "labels"))


def test_the_unigram_perplexity_of_a_corpus_is_of_its_words(workdir):
    """Train has 1 + 1 [UNK], 2 + 1 "the", "cat" and ".", 1 + 1 "sat", "mat" and "##s": 17 in all.
    Val has "the", ".", "mat" and three [UNK]. [SEP] counts in neither."""
    prepare_sample()
    expected = (17 / 3) ** (2 / 6) * (17 / 2) ** (4 / 6)
    assert Corpus("sample").meta["unigram_perplexity"] == pytest.approx(expected)


def test_a_folder_of_transformers_5_has_only_a_tokenizer_json(workdir):
    """Its tokens are in the order of their ids, not of their names."""
    load_tokenizer("vocab.txt").save("tokenizer.json")
    Path("vocab.txt").unlink()
    assert read_vocab(".") == PIECES


def test_a_byte_level_bpe_is_known_from_its_vocabulary():
    """The merges of a BPE that `tokenizers` learned here, and what it makes of a text."""
    texts = ["the cat sat on the mat, the cats sat", "a hat that\n the  rat ate at Café", "attata",
             "aaa aaaaa aaa aaa"]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=290, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    learned = json.loads(theirs.to_str())["model"]
    vocab = [*sorted(learned["vocab"], key=learned["vocab"].get), *GPT2_SPECIALS]
    ids = {token: number for number, token in enumerate(vocab)}
    assert len(learned["merges"]) > 20 and ["aa", "a"] in learned["merges"]  # the left pair first
    assert vocabulary._merges(ids) == [tuple(pair) for pair in learned["merges"]]
    ours = vocabulary.byte_level_tokenizer(vocab)
    for text in [*texts, "", " ca", "Ünïcode 😀"]:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == text
    the, cat = (theirs.encode(text).ids for text in ("the", " cat"))
    assert ours.encode("<s>the <mask> cat</s>").ids == [  # the mask has the space before it
        ids["<s>"], *the, ids["<mask>"], *cat, ids["</s>"]]


def test_batches_are_a_function_of_seed_and_step(place):
    """An epoch reads every token once, but for those left over at its ends."""
    corpus = Corpus("tiny")
    config = pretrain.Config(**TINY)
    batches, tokens = MaskedBatches(corpus, config), corpus.split("train")
    where = {bytes(tokens[at:at + 14]): at for at in range(len(tokens) - 13)}
    assert len(where) == len(tokens) - 13  # no 14 tokens in a row stand there twice

    def starts(epoch):
        """Where in the text the sequences of an epoch begin; two make a micro-batch."""
        for number in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            cls, *row, sep = unmasked(batches.get(*divmod(number // 2, 2)))[number % 2]
            assert (cls, sep) == (corpus.special_ids.cls, corpus.special_ids.sep)
            yield where[bytes(np.array(row, "<u2"))]

    first, second = list(starts(0)), list(starts(1))
    assert set(np.diff(sorted(first))) == set(np.diff(sorted(second))) == {14}
    assert len(first) == len(tokens) // 14 - 1
    assert first != sorted(first) and np.argsort(first).tolist() != np.argsort(second).tolist()
    assert min(first) != min(second)
    masks = {str(batches.get(*divmod(n, 2))["positions"].tolist()) for n in range(5)}
    assert len(masks) == 5
    batch = batches.get(2, 0)
    again = MaskedBatches(corpus, config).get(2, 0)
    assert batch.keys() == again.keys()
    assert all(np.array_equal(again[name], batch[name]) for name in batch)
    other = MaskedBatches(corpus, dataclasses.replace(config, seed=1))
    assert not np.array_equal(unmasked(other.get(2, 0)), unmasked(batch))  # another order
    other.order, other.text = batches.order, batches.text
    assert np.array_equal(unmasked(other.get(2, 0)), unmasked(batch))
    assert not np.array_equal(other.get(2, 0)["positions"], batch["positions"])
    assert batches.epochs(batches.per_epoch) == 2 * 2  # steps of 2 x 2 sequences
