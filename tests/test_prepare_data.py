"""
Commands of prepare_data.py, from files on disk.
"""
import shutil
import tarfile
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
        Path(f"wiki/wiki.{name}.raw").write_text(WIKITEXT)
    shutil.make_archive("wiki", "zip", ".", "wiki")
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    for place, *options in (("wiki", "--name", "new"), ("wiki.zip", "--raw")):
        prepare("wikitext103", "--from", place, "--vocab", "vocab.txt", *options)
    corpus, raw = Corpus("wikitext2"), Corpus("wikitext103_raw")
    assert corpus.meta["documents"] == raw.meta["documents"] == {"train": 2, "val": 2, "test": 2}
    assert [texts_of(corpus, split)[1] for split in ("train", "val", "test")] == [
        f"[UNK] [UNK] [UNK] cat {word} {word}" for word in ("the", "mat", "cat")]  # = Second =
    assert texts_of(raw, "val")[1] == "[UNK] [UNK] [UNK] cat"
    assert Corpus("new").meta["sha256"] == corpus.meta["sha256"]


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 on this machine")
def test_wikitext2_has_the_articles_that_were_published(workdir):
    Path("wiki").mkdir()
    for name in ("valid", "test"):
        Path(f"wiki/{name}.txt").write_bytes((SHARED / f"wikitext-2/{name}.txt").read_bytes())
    with open(SHARED / "wikitext-2/train.txt", encoding="utf-8") as file:
        text = file.read(200000)
    Path("wiki/train.txt").write_text(text, encoding="utf-8")
    prepare("wikitext2", "--from", "wiki", "--vocab_size", 1000)
    corpus = Corpus("wikitext2")
    assert (corpus.meta["documents"]["val"], corpus.meta["documents"]["test"]) == (60, 60)
    whole = load_tokenizer(corpus.folder).encode(text).ids  # documents and lines are only cut
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
    with pytest.raises(UserError, match="--from: expected 2 arguments"):
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
    with pytest.raises(UserError, match="unrecognized arguments: --raw"):
        prepare("docs", "--raw")


def test_a_vocabulary_that_is_too_large(workdir):
    with pytest.raises(UserError, match="ids of 16 bits"):
        prepare("docs", "--vocab_size=70000")
