"""
Commands of prepare_data.py, from files on disk.
"""
import itertools
import tarfile
import zipfile
from pathlib import Path

import pytest

from lib.corpus import Corpus
from lib.errors import UserError
from lib.tokenizer import load_tokenizer
from tests.helpers import SHARED, WIKITEXT, prepare, texts_of, write_parquet


def test_wikitext_from_disk(workdir):
    """A folder or a zip of it, with <unk> or raw, in official splits."""
    Path("wiki").mkdir()
    for name, word in (("train", "the"), ("valid", "mat"), ("test", "cat")):
        Path(f"wiki/wiki.{name}.tokens").write_text(f"{WIKITEXT} {word} {word}\n")
        Path(f"wiki/wiki.{name}.raw").write_text(WIKITEXT.replace("mat", "sat"))
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    corpus = Corpus("wikitext2")
    assert corpus.meta["documents"] == {"train": 2, "val": 2, "test": 2}
    assert [texts_of(corpus, split)[1] for split in ("train", "val", "test")] == [
        f"[UNK] [UNK] [UNK] cat {word} {word}" for word in ("the", "mat", "cat")]  # = Second =
    with zipfile.ZipFile("wiki.zip", "w") as archive:
        for path in Path("wiki").iterdir():
            archive.write(path, f"wikitext-2-raw/{path.name}")
    prepare("wikitext2", "--raw", "--from", "wiki.zip", "--vocab_size", "256")
    raw = Corpus("wikitext2_raw")
    assert raw.meta["documents"] == corpus.meta["documents"] and raw.meta["source"] == "wiki.zip"
    assert "mat" not in load_tokenizer(raw.folder).decode(raw.split("train"))
    prepare("wikitext103", "--from", "wiki.zip", "--vocab", "vocab.txt", "--name", "other")
    assert Corpus("other").meta["tokens"] == corpus.meta["tokens"]


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 on this machine")
def test_wikitext2_has_the_articles_that_were_published(workdir):
    Path("wiki").mkdir()
    for name in ("valid", "test"):
        Path(f"wiki/{name}.txt").write_bytes((SHARED / f"wikitext-2/{name}.txt").read_bytes())
    with open(SHARED / "wikitext-2/train.txt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, 1000))
    Path("wiki/train.txt").write_text("".join(lines), encoding="utf-8")
    prepare("wikitext2", "--from", "wiki", "--vocab_size", 1000)
    corpus = Corpus("wikitext2")
    assert (corpus.meta["documents"]["val"], corpus.meta["documents"]["test"]) == (60, 60)
    assert corpus.vocab_size == 1000 and corpus.special_ids == (0, 1, 2, 3, 4)
    tokenizer = load_tokenizer(corpus.folder)
    whole = tokenizer.encode(" ".join(lines)).ids  # white space is all that separates lines
    train = corpus.split("train")
    assert train[train != corpus.special_ids.sep].tolist() == whole


def test_wikibooks_from_disk(workdir, monkeypatch):
    """Parquet and text, Wikipedia by article and BookCorpus by lines, give the same ids."""
    monkeypatch.setattr("lib.text.SENTENCES", 2)
    articles = ["the cat\n\nsat .", "the mat", "", None, "the cat\n\nsat .", "cats"]
    sentences = ["cat", "sat", "mat", "the", "cats"]
    write_parquet("wiki/train-0.parquet", articles[:2])
    write_parquet("wiki/train-1.parquet", articles[2:])
    write_parquet("books.parquet", sentences)
    Path("books.txt").write_text("\n".join(sentences) + "\n")
    with tarfile.open("bookcorpus.tar.bz2", "w:bz2") as archive:
        archive.add("books.txt")
    for place in ("books.parquet", "books.txt", "bookcorpus.tar.bz2"):
        prepare("wikibooks", "--from", "wiki", place, "--vocab", "vocab.txt", "--force")
        corpus = Corpus("wikibooks")
        assert texts_of(corpus, "train") == ["the cat sat .", "the mat", "cat ##s", "cat"]
        assert texts_of(corpus, "val") == ["sat mat"]  # cut where two lines hash to 0, modulo 2
        assert texts_of(corpus, "test") == ["the cat ##s"]
    assert corpus.meta["duplicates"] == 1  # an article
    with pytest.raises(UserError, match="--from: expected 2 PATH, of wikipedia and bookcorpus"):
        prepare("wikibooks", "--from", "wiki")


def test_gpt2(workdir, gpt2_files):
    """Another corpus can take the vocabulary."""
    Path("a.txt").write_text("One, two\nthree\n\nCaf\u00e9!\n\nfour  five\n\nsix </s>\n")
    prepare("text", "bytes", "a.txt", "--tokenizer", "gpt2")
    prepare("text", "again", "a.txt", "--vocab", "data/bytes")
    for file in ("tokenizer.json", "train.bin", "vocab.txt"):
        assert Path("data/again", file).read_bytes() == Path("data/bytes", file).read_bytes()
    corpus = Corpus("bytes")
    assert corpus.vocab_size == 50261 and corpus.special_ids == (50259, 50256, 50257, 50258, 50260)
    text = load_tokenizer(corpus.folder).decode(corpus.split("test"), skip_special_tokens=False)
    assert text == "six </s>\n</s>" and corpus.split("test")[-1] == 50258


def test_options_that_a_command_lacks(workdir):
    for option, message in (("--raw", "unrecognized arguments: --raw"),
                            ("--vocab_size=70000", "ids of 16 bits")):
        with pytest.raises(UserError, match=message):
            prepare("docs", option)
