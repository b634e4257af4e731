"""
Text to documents, and documents to token files, by hand.
"""
import ast
import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import lib.text
from lib.corpus import SPLITS, Corpus
from lib.errors import UserError
from lib.text import find_files, read_documents
from lib.tokenizer import load_tokenizer
from prepare_data import find_docstrings
from tests.helpers import PIECES, files, prepare, prepare_sample, texts_of, write_parquet


@pytest.mark.parametrize("ends, text, documents", [
    ("blank", "the cat\nsat\n\n \nmat\n", [["the cat\n", "sat\n"], ["mat\n"]]),
    ("blank", "\r\nthe cat\r\nsat\r\n\r\nmat", [["the cat\n", "sat\n"], ["mat\n"]]),
    ("file", "the cat\n\nmat\n", [["the cat\n", "mat\n"]]),
    ("blank", "", []), ("blank", "\n \n", [])])
def test_documents(workdir, ends, text, documents):
    Path("a.txt").write_bytes(text.encode())
    assert list(read_documents(Path("a.txt"), ends)) == documents


def test_rows_of_parquet(workdir):
    """A row is a document, whatever blank lines it has; for BookCorpus it is a line."""
    write_parquet("a.parquet", ["the cat\r\n\r\nsat", "", None, "mat"])
    for ends in ("blank", "file"):
        documents = list(read_documents(Path("a.parquet"), ends))
        assert documents == [["the cat\n", "sat\n"], ["mat\n"]]
    assert list(read_documents(Path("a.parquet"), "sentences")) == [["the cat\n", "sat\n", "mat\n"]]


def test_text_that_is_not_utf8_is_named(workdir):
    Path("books").mkdir()
    Path("books/1.txt").write_text("cat\n\nmat\n\nsat\n")
    Path("books/2.txt").write_bytes("caf\u00e9".encode("cp1252"))
    with pytest.raises(UserError, match="^books/2.txt: not UTF-8 .*iconv -f WINDOWS-1252"):
        prepare("text", "new", "books", "--vocab", "vocab.txt")
    assert not Path("data/new").exists()


def test_files_of_a_folder(workdir):
    Path("books/more").mkdir(parents=True)
    for name in ("b.txt", "a.TXT", "notes.md", "more/c.txt"):
        Path("books", name).write_text(name)
    found = find_files(Path("books"), ".txt")
    assert found == [Path("books", name) for name in ("a.TXT", "b.txt", "more/c.txt")]
    assert find_files(Path("books/notes.md"), ".txt") == [Path("books/notes.md")]


def test_docstrings_stand_in_the_order_of_the_source():
    """From a tree that is never imported, those that calls attach included."""
    tree = ast.parse(
        '"""Module.\n\n    Indented."""\nimport nothing_like_it\nclass A:\n    "Class."\n'
        'try:\n    pass\nexcept E:\n    def f():\n        """Function."""\n'
        'abs = _C._add_docstr(torch.abs, r"""\nabs(x)\n\n    more {x}""".format(x=1))\n'
        'add_newdoc("A", ("b", """\n    b()"""))\n'
        'call("""not\na docstring""")\nasync def g():\n    "Last."\n')
    assert list(filter(None, find_docstrings(tree))) == [
        "Module.\n\nIndented.", "Class.", "Function.", "abs(x)\n\n    more {x}", "b()", "Last."]


@pytest.fixture
def library(workdir, monkeypatch):
    """A standard library of 40 files; one docstring of each is the same. No other packages."""
    library = workdir / "library"
    (library / "tests").mkdir(parents=True)
    for number in range(40):
        text = f'"""{number}.\n\nMore."""\ndef f():\n    "Same."'
        (library / f"m{number:02}.py").write_text(text)
    (library / "tests/m.py").write_text('"""A test."""')
    (library / "bad.py").write_text('"""Bad."""\ndef')
    monkeypatch.setattr(ast, "__file__", str(library / "ast.py"))
    for package in (torch, np):
        monkeypatch.setattr(package, "__file__", "nowhere/__init__.py")
    return library


def test_docs(library):
    prepare("docs", "--vocab_size", 400)
    corpus = Corpus("docs")
    assert corpus.meta["documents"] == {"train": 36, "val": 2, "test": 2}
    tokenizer = load_tokenizer(corpus.folder)
    assert tokenizer.decode(corpus.split("val")) == "18. more. 38. more."
    assert tokenizer.decode(corpus.split("train")).count("same.") == 1


def test_docs_task(library):
    """Its dev are the files of the corpus's val. What train has is in no other split."""
    (library / "m39.py").write_text('"0.\\n\\nAgain."')
    prepare("docs_task")
    rows = {split: Path(f"data/docs_task/{split}.tsv").read_text().splitlines()
            for split in ("train", "dev", "test")}
    assert rows["train"][:3] == ["sentence\tlabel", "0.\tPython", "Same.\tPython"]
    assert rows["dev"] == ["sentence\tlabel", "18.\tPython", "38.\tPython"]
    assert rows["test"] == ["index\tsentence", "0\t19."]


def test_a_corpus_by_hand(workdir):
    """Four documents: the first two are for train, then one for val and one for test."""
    prepare_sample()
    corpus = Corpus("sample")
    assert texts_of(corpus, "train") == ["the cat sat . the mat ##s", "[UNK] cat ."]
    # [SEP] in a text is text: "[", "sep", "]"
    assert texts_of(corpus, "val") == ["the mat . [UNK] [UNK] [UNK]"]
    content = Path("data/sample/test.bin").read_bytes()
    assert content == bytes([7, 0, 7, 0, 3, 0]) and corpus.split("test").dtype == np.uint16
    assert corpus.special_ids == (0, 1, 2, 3, 4) and corpus.vocab_size == len(PIECES)
    meta = corpus.meta
    assert meta["tokenizer_hash"] == hashlib.sha256("\n".join(PIECES).encode()).hexdigest()
    assert meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert meta["unknown"] == {"train": 1, "val": 3, "test": 0}
    assert meta["tokens"] == {"train": 12, "val": 7, "test": 3}
    assert meta["sha256"]["test"] == hashlib.sha256(content).hexdigest()
    assert meta["source"] == "1 text files: sample.txt"
    # train has 1 + 1 [UNK], 2 + 1 "the", "cat" and ".", 1 + 1 "sat", "mat" and "##s": 17 in all;
    # val has "the", ".", "mat" and three [UNK]; [SEP] counts in neither
    expected = (17 / 3) ** (2 / 6) * (17 / 2) ** (4 / 6)
    assert meta["unigram_perplexity"] == pytest.approx(expected)
    assert sorted(path.name for path in corpus.folder.iterdir()) == [
        "meta.json", "test.bin", "train.bin", "val.bin", "vocab.txt"]


def test_the_first_of_equal_documents_stays(workdir):
    """Whatever file it is in; the held-out ones are of what stays."""
    Path("a.txt").write_text("cat\n\nmat\nsat\n\ncat\n\n")
    Path("b.txt").write_text("mat sat\n\nsat\n\nmat\nsat\n\nthe\n")
    prepare("text", "one", "a.txt", "b.txt", "a.txt", "--vocab", "vocab.txt")
    corpus = Corpus("one")
    assert texts_of(corpus, "train") == ["cat", "mat sat", "mat sat"]  # "mat\nsat" and "mat sat"
    assert texts_of(corpus, "val") == ["sat"] and texts_of(corpus, "test") == ["the"]
    assert corpus.meta["duplicates"] == 2


def test_one_document_in_val_every_is_held_out(workdir):
    Path("books").mkdir()
    for number in range(1, 21):
        Path(f"books/{number:02}.txt").write_text("cat\n\n" * number)
    prepare("text", "books", "books", "--split", "file", "--val_every", 10, "--vocab", "vocab.txt")
    corpus = Corpus("books")
    assert texts_of(corpus, "val") == [" ".join(["cat"] * number) for number in (9, 19)]
    assert texts_of(corpus, "test") == [" ".join(["cat"] * number) for number in (10, 20)]
    assert corpus.meta["documents"]["train"] == 16


def test_batches_do_not_change_the_ids(workdir, monkeypatch):
    prepare_sample()
    monkeypatch.setattr(lib.text, "BATCH", 2)
    prepare("text", "small", "sample.txt", "--vocab", "data/sample")
    for which in SPLITS:
        big, small = (Corpus(name).split(which) for name in ("sample", "small"))
        assert np.array_equal(big, small)


def test_a_book_that_is_there_twice_is_found_at_any_offset(workdir, monkeypatch):
    """All its documents but the first and the last are duplicates."""
    monkeypatch.setattr(lib.text, "SENTENCES", 40)
    rng = random.Random(3)
    words = ["the", "cat", "sat", "mats", "mat."]
    lines = [" ".join(rng.choices(words, k=14)) + "\n" for _ in range(2500)]
    Path("books.txt").write_text("".join([*lines, *lines[507:2000], *lines[:100]]))
    documents = list(read_documents(Path("books.txt"), "sentences"))
    prepare("bookcorpus", "--from", "books.txt", "--vocab", "vocab.txt")
    meta = Corpus("bookcorpus").meta
    assert 70 < len(documents) < 140  # mean length 40
    assert sum(meta["documents"].values()) + meta["duplicates"] == len(documents)
    repeated = sum("".join(document) in "".join(lines[507:2000]) for document in documents) / 2
    assert repeated - 2 <= meta["duplicates"] <= repeated + 3


def test_a_corpus_is_whole_or_absent(workdir, monkeypatch):
    """A preparation that stops leaves what was there before, and the next one starts anew."""
    prepare_sample()
    old = files("data/sample")
    Path("sample.txt").write_text("mat\n\ncat\n\nsat\n\nmat cat\n\nmat sat\n")

    def stop(*counts):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(lib.text, "unigram_perplexity", stop)  # the token files are written
        with pytest.raises(KeyboardInterrupt):
            prepare_sample("--force")
    assert files("data/sample") == old
    assert [name for name in os.listdir("data") if not name.startswith(".lock")] == ["sample"]
    prepare_sample("--force")
    assert Corpus("sample").meta["documents"] == {"train": 3, "val": 1, "test": 1}
