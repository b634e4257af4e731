"""
Commands of prepare_data.py, from files on disk to token files, by hand.
"""
import ast
import gzip
import hashlib
import os
import random
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.corpus import Corpus
from lib.settings import Failure, UserError
from lib.tokenizer import load_tokenizer
from prepare_data import find_files
from tests.helpers import (
    PIECES,
    files,
    prepare,
    texts_of,
    write_parquet,
)


def prepare_sample(*more):
    prepare("text", "sample", "sample.txt", "--vocab", "vocab.txt", *more)


def random_lines(number):
    """Draw lines that are all different: two words and [UNK]."""
    rng = random.Random(3)
    return [" ".join(rng.choices(["the", "cat", "sat", "mat"], k=2)) + f" {n}\n"
            for n in range(number)]


def test_a_corpus_by_hand(workdir):
    """Four documents: the first two are for train, then one for val and one for test."""
    prepare_sample()
    corpus = Corpus("sample")
    assert texts_of(corpus, "train") == ["the cat sat . the mat ##s", "[UNK] cat ."]
    # [SEP] in a text is text: "[", "sep", "]"
    assert texts_of(corpus, "val") == ["the mat . [UNK] [UNK] [UNK]"]
    content = Path("data/sample/test.bin").read_bytes()
    assert content == bytes([7, 0, 7, 0, 3, 0])
    assert corpus.split("test").dtype == np.uint16
    assert corpus.special_ids == (0, 1, 2, 3, 4)
    assert corpus.vocab_size == len(PIECES)
    meta = corpus.meta
    assert meta["tokenizer_hash"] == hashlib.sha256("\n".join(PIECES).encode()).hexdigest()
    assert meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert meta["unknown"] == {"train": 1, "val": 3, "test": 0}
    assert meta["tokens"] == {"train": 12, "val": 7, "test": 3}
    assert meta["sha256"]["test"] == hashlib.sha256(content).hexdigest()
    # train has 1 + 1 [UNK], 2 + 1 "the", "cat" and ".", 1 + 1 "sat", "mat" and "##s": 17 in all;
    # val has "the", ".", "mat" and three [UNK]; [SEP] counts in neither
    expected = (17 / 3) ** (2 / 6) * (17 / 2) ** (4 / 6)
    assert meta["unigram_perplexity"] == pytest.approx(expected)


@pytest.mark.parametrize("split, documents", [
    ("blank", ["the cat sat", "mat", "cat sat mat", "cat cat", "the mat"]),
    ("file", ["the cat sat mat", "cat sat mat cat cat", "the mat"])])
def test_documents_of_a_folder(workdir, split, documents):
    """They come from its *.txt in order, whatever the ends of lines and the blank lines."""
    Path("books/more").mkdir(parents=True)
    for name, text in {"a.TXT": "\r\nthe cat\r\nsat\r\n\r\nmat", "more/c.txt": "the\nmat",
                       "b.txt": "cat sat\nmat\n\n \ncat cat\n\n", "notes.md": "cat", "d.txt": " \n"
                       }.items():
        Path("books", name).write_bytes(text.encode())
    prepare("text", "new", "books", "--split", split, "--vocab", "vocab.txt")
    corpus = Corpus("new")
    found = [texts_of(corpus, which) for which in ("train", "val", "test")]
    assert found == [documents[:-2], documents[-2:-1], documents[-1:]]


def test_the_first_of_equal_documents_stays(workdir):
    """Whatever file it is in; the held-out ones are of what stays."""
    Path("a.txt").write_text("cat\n\nmat\nsat\n\ncat\n\n")
    Path("b.txt").write_text("mat sat\n\nsat\n\nmat\nsat\n\nthe\n")
    prepare("text", "one", "a.txt", "b.txt", "a.txt", "--vocab", "vocab.txt")
    corpus = Corpus("one")
    assert texts_of(corpus, "train") == ["cat", "mat sat", "mat sat"]  # "mat\nsat" and "mat sat"
    assert texts_of(corpus, "val") == ["sat"]
    assert texts_of(corpus, "test") == ["the"]
    assert corpus.meta["duplicates"] == 2


def test_one_document_in_val_every_is_held_out(workdir, capsys):
    Path("books").mkdir()
    for number in range(1, 21):
        Path(f"books/{number:02}.txt").write_text("cat\n\n" * number)
    prepare("text", "books", "books", "--split", "file", "--val_every", 10, "--vocab", "vocab.txt")
    corpus = Corpus("books")
    assert texts_of(corpus, "val") == [" ".join(["cat"] * number) for number in (9, 19)]
    assert texts_of(corpus, "test") == [" ".join(["cat"] * number) for number in (10, 20)]
    assert corpus.meta["documents"]["train"] == 16
    assert "documents for val: only 2 (blank lines end documents" in capsys.readouterr().out


TEXT = "cat\n\nmat\n\nsat\n" * 9


@pytest.mark.parametrize("content, word", [
    ("caf\u00e9".encode("cp1252"), "iconv"), (gzip.compress(b"cat"), "gzip"),
    (b"PK\x03\x04cat", "zip"), (TEXT.encode("utf-16"), "UTF-16,"),
    (TEXT.encode("utf-16-be"), "UTF-16 or binary")])
def test_text_that_is_not_utf8_is_named(workdir, content, word):
    Path("books").mkdir()
    Path("books/1.txt").write_text("cat\n\nmat\n\nsat\n")
    Path("books/2.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"^books/2.txt: .* {word}"):
        prepare("text", "new", "books", "--vocab", "vocab.txt")
    assert not Path("data/new").exists()


def test_a_folder_is_read_whole(workdir):
    """Whatever its folders are called, also where a link leads, but nothing hidden or twice."""
    for name in ("b/x.txt/1.txt", "b/a.txt", ".git/a.txt", "b/._a.txt", "../more/1.txt"):
        Path("books", name).parent.mkdir(parents=True, exist_ok=True)
        Path("books", name).write_text("cat")
    Path("books/c").symlink_to("../more")
    Path("books/b/loop").symlink_to("..")
    found = find_files(Path("books"), ".txt")
    assert list(map(str, found)) == ["books/b/a.txt", "books/b/x.txt/1.txt", "books/c/1.txt"]
    Path("books/d.txt").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="books/d.txt"):
        prepare("text", "new", "books", "--vocab", "vocab.txt")


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.tar.xz", "a.zip", "a.parquet"])
def test_archives_and_parquet_are_read_or_named(workdir, name):
    if name == "a.parquet":
        write_parquet(name, ["cat", "mat", "sat"])
    elif name == "a.zip":
        shutil.make_archive("a", "zip", ".", "sample.txt")
    else:
        with tarfile.open(name, f"w:{name[-2:].replace('ar', '')}") as archive:
            archive.add("sample.txt")
    prepare("text", "new", name, "--vocab", "vocab.txt")
    content = Path(name).read_bytes()
    Path(name).write_bytes(content[:len(content) // 2] if name != "a.tar" else b"no tar")
    with pytest.raises(UserError, match=f"^{name}"):
        prepare("text", "other", name, "--vocab", "vocab.txt")


@pytest.mark.parametrize("column, texts", [("body", ["cat"]), ("text", [1])])
def test_parquet_without_text_is_named(workdir, column, texts):
    write_parquet("a.parquet", texts, column)
    with pytest.raises(UserError, match="^a.parquet"):
        prepare("text", "new", "a.parquet", "--vocab", "vocab.txt")


@pytest.mark.parametrize("text", ["cat\n\nmat\n", TEXT + "\nthe\n", "", TEXT.replace("m", "c")])
def test_a_text_that_changes_between_readings_is_refused(workdir, monkeypatch, text):
    Path("a.txt").write_text(TEXT)
    monkeypatch.setattr("prepare_data.write_vocab", lambda *args: Path("a.txt").write_text(text))
    with pytest.raises(Failure, match="^the text changed"):
        prepare("text", "new", "a.txt", "sample.txt", "--vocab", "vocab.txt")
    assert not Path("data/new").exists()


@pytest.mark.parametrize("marks, said", [(3, False), (4, True)])
def test_a_vocabulary_that_removes_a_hundredth_is_named(workdir, capsys, marks, said):
    """The text has 300 letters, and marks."""
    documents = [f"the {n}" for n in range(100 - marks)] + [f"th\u00e9 {n}" for n in range(marks)]
    Path("text.txt").write_text("\n\n".join(documents))
    prepare("text", "new", "text.txt", "--vocab", "vocab.txt")
    line = f"removes {marks / (300 + marks):.1%} of the letters"
    assert (line in capsys.readouterr().out) == said


def test_a_corpus_is_whole_or_absent(workdir, monkeypatch):
    """A preparation that stops leaves what was there before, and the next one starts anew."""
    prepare_sample()
    old = files("data/sample")
    Path("sample.txt").write_text("mat\n\ncat\n\nsat\n\nmat cat\n\nmat sat\n")

    def stop(*args, **settings):
        assert list(Path("data").glob(".*/test.bin"))  # the token files are written
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("json.dumps", stop)  # of meta.json
        with pytest.raises(KeyboardInterrupt):
            prepare_sample("--force")
    assert files("data/sample") == old
    assert [name for name in os.listdir("data") if not name.startswith(".lock")] == ["sample"]
    prepare_sample("--force")
    assert Corpus("sample").meta["documents"] == {"train": 3, "val": 1, "test": 1}


@pytest.fixture
def library(workdir, monkeypatch):
    """Put a library of 40 files in place of Python's. One docstring of each is the same."""
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
    """A docstring comes once, and a source file is a document."""
    prepare("docs", "--vocab_size", 400)
    corpus = Corpus("docs")
    assert corpus.meta["documents"] == {"train": 36, "val": 2, "test": 2}
    tokenizer = load_tokenizer(corpus.folder)
    assert tokenizer.decode(corpus.split("val")) == "18. more. 38. more."
    assert tokenizer.decode(corpus.split("train")).count("same.") == 1


SOURCE = '''
"""Module
    of   two lines.

    More."""
import nothing_like_it
class A:
    "Class."
try:
    pass
except E:
    def f():
        """Function."""
abs = _C._add_docstr(torch.abs, r"""
abs(x)

    more {x}""".format(x=1))
add_newdoc("A", ("b", """
    b()"""))
call("""not
a docstring""")
async def g():
    "Last."
'''


def test_docs_task(library):
    """Rows are docstrings in the order of the source, those that calls attach included.

    Dev has the files of the corpus's val, without what train has.
    """
    (library / "m00.py").write_text(SOURCE.strip())
    (library / "m38.py").write_text('"1.\\n\\nAgain."')
    prepare("docs_task")
    train, dev = (Path(f"data/docs_task/{split}.tsv").read_text().splitlines()
                  for split in ("train", "dev"))
    assert train[:8] == ["sentence\tlabel", *(f"{text}\tPython" for text in (
        "Module of two lines.", "Class.", "Function.", "abs(x)", "b()", "Last.", "1."))]
    assert dev == ["sentence\tlabel", "18.\tPython"]
    assert not any(line.startswith(("19.", "Again")) for line in train)


WIKITEXT = """ \n = First = \n \n a cat \n \n = = Part = = \n \n the mat \n Key : G \n = Goals = \n
 \n = De sat : a book = \n cat . \n \n = Second = \n \n cat \n"""


def test_wikitext(workdir):
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


def test_wikibooks(workdir):
    """Wikipedia by article, BookCorpus by lines; what kind of file they are in does not matter.

    The text is long: lines are encoded some thousands at a time.
    """
    articles = ["the cat\r\n\r\nsat .", "the mat", "", None, "the cat\n\nsat .", "cats"]
    lines = random_lines(6000)
    write_parquet("wiki/train-0.parquet", articles[:2])
    write_parquet("wiki/train-1.parquet", articles[2:])
    write_parquet("books.parquet", list(map(str.strip, lines)))
    Path("books.txt").write_text("".join(lines))
    with tarfile.open("bookcorpus.tar.bz2", "w:bz2") as archive:
        archive.add("books.txt")
    for place in ("books.parquet", "books.txt", "bookcorpus.tar.bz2"):
        prepare("wikibooks", "--from", "wiki", place, "--vocab", "vocab.txt", "--force")
        corpus = Corpus("wikibooks")
        first, second, third, *books = texts_of(corpus, "train")
        assert [first, second, third] == ["the cat sat .", "the mat", "cat ##s"]
        books += texts_of(corpus, "val") + texts_of(corpus, "test")
        assert " ".join(books) == re.sub(r"\d+", "[UNK]", " ".join("".join(lines).split()))
        assert 3 <= len(books) <= 12  # of about 1,000 lines
    assert corpus.meta["duplicates"] == 1  # an article


def test_a_book_that_is_there_twice_is_found_at_any_offset(workdir):
    """All its documents but the first and the last are duplicates."""
    lines = random_lines(30000)
    Path("books.txt").write_text("".join([*lines, *lines[5070:25000], *lines[:1000]]))
    prepare("bookcorpus", "--from", "books.txt", "--vocab", "vocab.txt")
    meta = Corpus("bookcorpus").meta
    kept = sum(meta["tokens"].values()) - sum(meta["documents"].values())  # without [SEP]
    assert meta["duplicates"] > 10
    assert 0 < kept / 3 - 30000 < 6000


def test_gpt2(workdir, gpt2_files):
    """Another corpus can take the vocabulary."""
    Path("a.txt").write_text("One, two\nthree\n\nCaf\u00e9!\n\nfour  five\n\nsix </s>\n")
    prepare("text", "bytes", "a.txt", "--tokenizer", "gpt2")
    prepare("text", "again", "a.txt", "--vocab", "data/bytes")
    for file in ("tokenizer.json", "train.bin", "vocab.txt"):
        assert Path("data/again", file).read_bytes() == Path("data/bytes", file).read_bytes()
    corpus = Corpus("bytes")
    assert corpus.vocab_size == 50261
    assert corpus.special_ids == (50259, 50256, 50257, 50258, 50260)
    text = load_tokenizer(corpus.folder).decode(corpus.split("test"), skip_special_tokens=False)
    assert text == "six </s>\n</s>"
    assert corpus.split("test")[-1] == 50258
