"""
Vocabularies and tokenizers, beside Hugging Face's and tiktoken's.
"""
import itertools
import json
import random
import unicodedata
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from lib.corpus import Corpus
from lib.settings import UserError
from lib.tasks import encode_examples
from lib.tokenizer import (
    SPECIALS,
    load_tokenizer,
    text_tokenizer,
    tokens_by_id,
    train_tokenizer,
    wordpiece_tokenizer,
    write_vocab,
)
from prepare_data import gpt2_tokenizer
from tests.helpers import PIECES, SHARED, prepare

TRICKY = ["Café déjà-vu, naïve!", "北京 is 中文 and かな", "don't  e.g. U.S.A.\t(x_1) <unk> @-@",
          "unaffable supercalifragilistic" * 5, "a [MASK] b", "\u00ad soft\u200b, \ufeffBOM ½ ﬁ Ⅷ",
          "İstanbul ẞ ǅ ıIi", "नमस्ते 😀 ok", "x\u0000y \x07", "The the Möchte möchte MOCHTE", "",
          "e\u0301 E\u0323\u0301 é", "x" * 100 + " " + "x" * 101, "中國a国，語", " \u3000\u2028 ",
          "[E1] x [e1]y new a_new NEW"]
BERT = SHARED / "bert-vocab/vocab.txt"
CHARACTERS = sorted({c for text in TRICKY for form in ("NFC", "NFD")
                     for c in unicodedata.normalize(form, text + text.lower()) if c.isprintable()})
VOCAB = [*SPECIALS, *CHARACTERS, *(f"##{c}" for c in CHARACTERS), "the", "The"]
E1, NEW = len(VOCAB), len(VOCAB) + 1
SETTINGS = [  # tokenizer_config.json
    {}, {"do_lower_case": False}, {"strip_accents": False},
    {"do_lower_case": False, "strip_accents": True, "tokenizer_class": "DistilBertTokenizerFast"},
    {"tokenize_chinese_chars": False, "tokenizer_class": "BertTokenizer"},
    {"added_tokens_decoder": {E1: {"content": "[E1]", "normalized": False, "special": True},
                              NEW: {"content": "new", "single_word": True}}}]
AS_SAVED = [{"tokenizer_class": kind} for kind in ("PreTrainedTokenizerFast", "TokenizersBackend")]


@pytest.mark.parametrize("settings, files", [
    *itertools.product(SETTINGS, ("vocab.txt", "added_tokens.json", "tokenizer.json")),
    *itertools.product([*AS_SAVED, None], ("tokenizer.json",))])
def test_tokens_of_a_folder_are_those_of_transformers(workdir, settings, files):
    """Also where they come from a corpus. The tokenizer.json is one that is not BERT's."""
    transformers = pytest.importorskip("transformers")
    tokenizer = wordpiece_tokenizer(VOCAB)
    write_vocab(Path("bert"), tokenizer)
    texts = {"config.json": {"model_type": "bert"}}
    if settings is not None:
        texts["tokenizer_config.json"] = settings
    if files == "added_tokens.json":
        texts[files] = {"new": NEW, "[E1]": E1}
    if files == "tokenizer.json":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_tokens([tokenizers.AddedToken("[E1]", special=True), "new"])
        tokenizer.enable_truncation(3)
        texts[files] = json.loads(tokenizer.to_str())
        Path("bert/vocab.txt").unlink()  # as transformers 5 saves it
    for name, content in texts.items():
        Path("bert", name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained("bert")
    prepare("text", "corpus", "sample.txt", "--vocab", "bert")
    for folder, text in itertools.product(("bert", "data/corpus"), TRICKY):
        expected = theirs.encode(text, add_special_tokens=False)
        assert load_tokenizer(folder).encode(text).ids == expected, (folder, text)
    if files == "added_tokens.json":  # [SEP] in a text is text, [E1] is not
        assert text_tokenizer("bert").encode("[E1][SEP]").ids[:2] == [E1, VOCAB.index("[")]


SCRIPTS = "Má mà mả mã mạ हिन्दी नमस्ते น้ำ ป้า がぎぱ かき ёлка мой أحمد إلى Über İ"


@pytest.mark.parametrize("text, options, alone", [
    (SCRIPTS, [], False), (SCRIPTS, ["--cased"], False),
    ("A cat, a Mat", [], True), ("A cat, a Mat", ["--cased"], True)])
def test_a_learned_vocabulary_keeps_accents_and_marks(workdir, text, options, alone):
    """Its vocab.txt suffices where there are none. transformers reads it as a model's folder."""
    transformers = pytest.importorskip("transformers")
    Path("text.txt").write_text("\n\n".join(f"{text} {n}" for n in range(9)))
    prepare("text", "corpus", "text.txt", "--vocab_size", 400, *options)
    folder = Path("data/corpus")
    assert (folder / "tokenizer.json").exists() != alone
    expected = text if options else text.lower()
    tokens = load_tokenizer(folder).encode(text).tokens
    assert "".join(tokens).replace("##", "") == expected.replace(" ", "")
    if not alone:
        write_vocab(Path("copy"), load_tokenizer(folder))
        for name, content in (("config", {"model_type": "bert"}),
                              ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"})):
            Path(f"copy/{name}.json").write_text(json.dumps(content))
        theirs = transformers.AutoTokenizer.from_pretrained("copy")
        assert theirs.tokenize(text) == load_tokenizer("copy").encode(text).tokens == tokens


@pytest.mark.parametrize("size, many", [(900, False), (400, True)])
def test_a_vocabulary_has_the_characters_of_its_text(workdir, capsys, size, many):
    """There are 300. Room for 150 is said to be too little."""
    rng, characters = random.Random(0), [chr(0x4e00 + n) for n in range(300)]
    documents = ["".join(rng.choices(characters, k=50)) for _ in range(200)]
    Path("text.txt").write_text("\n\n".join(documents))
    prepare("text", "corpus", "text.txt", "--vocab_size", size)
    assert (Corpus("corpus").meta["unknown"]["train"] > 4000) == many
    assert ("WARNING: 4" in capsys.readouterr().out) == many


@pytest.mark.parametrize("name, content", [
    ("tokenizer_config.json", "[]"), ("tokenizer.json", "[]"), ("tokenizer.json", "null"),
    ("added_tokens.json", '{"new": "x"}'),
    ("tokenizer_config.json", '{"do_lower_case": "no"}'), ("vocab.txt", "\ufeff[PAD]\n")])
def test_a_folder_without_a_vocabulary_is_named(workdir, name, content):
    write_vocab(Path("bert"), wordpiece_tokenizer(PIECES))
    Path("bert", name).write_text(content, encoding="utf-16" if name == "vocab.txt" else "utf-8")
    with pytest.raises(UserError, match="^bert(/.*json)?: "):
        load_tokenizer("bert")


def test_tasks_know_ids_above_65_535():
    tokenizer = wordpiece_tokenizer([*SPECIALS, *(f"w{n}" for n in range(70_000))])
    [example] = encode_examples(tokenizer, [("w69999",)], [0], 8)
    assert example.ids.tolist() == [2, 70_004, 3]


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
    vocab = tokens_by_id(load_tokenizer("vocab.txt"))
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
    for path in ("vocab.txt", "."):
        assert tokens_by_id(load_tokenizer(path)) == vocab
    for text in ("the cat\n", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n"):
        Path("novel.txt").write_text(text)
        with pytest.raises(UserError, match="novel.txt"):
            load_tokenizer("novel.txt")


def test_a_vocabulary_is_a_function_of_the_text():
    """Many pairs of letters are equally frequent. Nothing is before a comma in its word."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef,", k=rng.randint(2, 6))) for _ in range(100)]
    found = [tokens_by_id(train_tokenizer(lambda: words, 100, 160)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert "##a" in found[0] and "##," not in found[0]
