"""
Vocabularies and tokenizers, beside Hugging Face's, tiktoken's and a trainer in plain Python.
"""
import collections
import itertools
import random
from pathlib import Path

import pytest
import tiktoken

from lib.settings import UserError
from lib.tokenizer import (
    SPECIALS,
    Specials,
    full_tokenizer,
    load_tokenizer,
    read_vocab,
    special_ids,
    text_tokenizer,
    tokens_by_id,
    wordpiece_tokenizer,
    write_vocab,
)
from prepare_data import gpt2_tokenizer, train_tokenizer
from tests.helpers import PIECES, SHARED

TRICKY = ["Café déjà-vu, naïve!", "北京 is 中文 and かな", "don't  e.g. U.S.A.\t(x_1) <unk> @-@",
          "unaffable supercalifragilistic" * 5, "a [MASK] b", "\u00ad soft\u200b, \ufeffBOM ½ ﬁ Ⅷ",
          "İstanbul ẞ ǅ", "नमस्ते 😀 ok", "x\u0000y \x07"]
BERT = SHARED / "bert-vocab/vocab.txt"


@pytest.mark.skipif(not BERT.exists(), reason="no BERT vocabulary on this machine")
def test_ids_are_hugging_faces():
    """Against Hugging Face's tokenizer in plain Python, which shares no code with `tokenizers`."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    theirs, ours = legacy.BertTokenizerLegacy(str(BERT)), load_tokenizer(BERT)
    for text in TRICKY:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("Hello, [MASK] WORLD").ids == [7592, 1010, 103, 2088]  # as published


def test_ids_of_gpt2(workdir, gpt2_files):
    """tiktoken's ids, also where the tokenizer is read again."""
    reference = tiktoken.get_encoding("gpt2")
    write_vocab(Path(), gpt2_tokenizer())
    vocab = read_vocab("vocab.txt")
    assert vocab[50256:] == ["<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"]
    tokenizer = text_tokenizer("vocab.txt")
    with open(SHARED / "wikipedia.txt", encoding="utf-8") as file:
        texts = [*TRICKY, "  two  spaces\n\n\ttabs \r\n", *itertools.islice(file, 300)]
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts)):
        assert encoding.ids == reference.encode_ordinary(text)
        assert tokenizer.decode(encoding.ids) == text
    text = "a </s> b<mask>"  # special tokens in a text are text
    assert tokenizer.encode(text).ids == reference.encode_ordinary(text)
    marked = load_tokenizer("vocab.txt").encode("<s>a <mask> b</s>").ids
    assert [vocab[i] for i in marked] == ["<s>", "a", "<mask>", "\u0120b", "</s>"]


def test_a_line_of_a_vocabulary_is_a_token(workdir):
    """Whatever white space is in it."""
    vocab = [*PIECES, "a b", "\u3000", "\u2028", "\x85c", "d\t"]
    write_vocab(Path(), wordpiece_tokenizer(vocab))
    assert read_vocab("vocab.txt") == read_vocab(".") == vocab
    Path("novel.txt").write_text("the cat\n")
    with pytest.raises(UserError, match="novel.txt"):
        read_vocab("novel.txt")


def test_a_folder_of_transformers_5_has_only_a_tokenizer_json(workdir):
    """Its tokens are in the order of their ids, not of their names."""
    load_tokenizer("vocab.txt").save("tokenizer.json")
    Path("vocab.txt").unlink()
    assert read_vocab(".") == read_vocab("vocab.txt") == PIECES


def test_special_tokens_in_a_text_and_around_it(workdir):
    pad, unk, cls, sep, mask = range(5)
    assert load_tokenizer("vocab.txt").encode("the [SEP] [MASK]").ids == [5, sep, mask]
    assert text_tokenizer("vocab.txt").encode("the [SEP]").ids == [5, unk, unk, unk]
    tokenizer = full_tokenizer("vocab.txt")
    pair, short = tokenizer.encode_batch([("the [MASK]", "cat"), ("sat", "the")])
    assert pair.ids == [cls, 5, mask, sep, 6, sep] and pair.type_ids == [0, 0, 0, 0, 1, 1]
    assert short.ids == [cls, 7, sep, 5, sep, pad] and short.attention_mask == [1] * 5 + [0]
    assert special_ids(tokenizer) == Specials(pad, unk, cls, sep, mask)


def merged(words, vocab, size):
    """Merge the most frequent pair until there are `size` tokens: the reference.

    Of equally frequent ones that with the lower ids.
    """
    words = [([word[0], *(f"##{c}" for c in word[1:])], count) for word, count in words.items()]
    while len(vocab) < size:
        pairs = collections.Counter()
        for pieces, count in words:
            for pair in itertools.pairwise(pieces):
                pairs[pair] += count
        a, b = min(pairs, key=lambda pair: (-pairs[pair], *map(vocab.index, pair)))
        new = a + b.removeprefix("##")
        vocab += [new] * (new not in vocab)
        for pieces, _ in words:
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == (a, b):
                    pieces[at:at + 2] = [new]
                at += 1
    return vocab


def test_a_vocabulary_is_a_function_of_the_text():
    """The one that the reference learns; the rarest characters are left out.

    Many pairs of letters are equally frequent.
    """
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 6))) for _ in range(100)]
    lines = [" ".join(rng.choices(words, k=12)) + " \u4e2d \u00c9t\u00e9, 1" for _ in range(99)]
    counts = collections.Counter(" ".join(lines).replace("\u00c9t\u00e9,", "ete ,").split())
    lines.append("x y z q r")
    vocab = [*SPECIALS, *(f"##{c}" for c in "1abcdeft"), *",1abcdeft\u4e2d"]
    tokenizer = train_tokenizer(lambda: lines, len(lines), 160)
    assert tokens_by_id(tokenizer) == merged(counts, vocab, 160)
