"""
From text to a corpus: readers, documents, ids, and a preparation that is killed.
"""
import ast
import collections
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import measure
import prepare_data
from for_transformers.export import export
from lib import tokenizer as vocabulary
from lib import write
from lib.corpus import SPLITS, Corpus
from lib.errors import Failure, UserError
from lib.files import lock
from lib.text import _docstrings, _rows, stream
from lib.tokenizer import SPECIALS, load_tokenizer
from tests.helpers import (
    PIECES,
    ROOT,
    SHARED,
    WIKITEXT,
    assert_one_line,
    byte_level_bpe,
    files,
    prepare,
    prepare_sample,
    texts_of,
    train,
    write_parquet,
)


def test_second_run_gives_the_same_bytes(workdir):
    prepare_sample()
    first = {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    prepare_sample("--force")
    assert first == {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    prepare("text", "sample2", "sample.txt", "--vocab", "data/sample")
    assert Path("data/sample2/train.bin").read_bytes() == first["train.bin"]


def test_documents_by_file_and_held_out_share(workdir):
    Path("books/more").mkdir(parents=True)
    for number in range(20):
        Path(f"books/{'more/' * (number % 2)}{number:02}.txt").write_text("cat\n\n" * (number + 1))
    Path("books/notes.md").write_text("sat")
    prepare("text", "books", "books", "--split", "file", "--val_every", 10, "--vocab", "vocab.txt")
    corpus = Corpus("books")
    assert corpus.meta["documents"] == {"train": 16, "val": 2, "test": 2}
    # 00, 02 ... 18, then more/01 ... more/19: the 9th and 19th are 16 and 17
    assert [len(text.split()) for text in texts_of(corpus, "val")] == [17, 18]
    assert [len(text.split()) for text in texts_of(corpus, "test")] == [19, 20]


DOUBLES = {"a.txt": "cat\n\nmat\nsat\n\ncat\n\n", "b.txt": "mat sat\n\nsat\n\nmat\nsat\n\nthe\n"}


def test_duplicates_are_dropped(workdir):
    """The first of equal documents stays, whatever file it is in; held out is from what stays."""
    for name, content in DOUBLES.items():
        Path(name).write_text(content)
    prepare("text", "one", "a.txt", "b.txt", "--vocab", "vocab.txt")
    corpus = Corpus("one")
    assert texts_of(corpus, "train") == ["cat", "mat sat", "mat sat"]  # "mat\nsat" and "mat sat"
    assert texts_of(corpus, "val") == ["sat"] and texts_of(corpus, "test") == ["the"]
    assert corpus.meta["duplicates"] == 2


def test_batches_do_not_change_the_ids(workdir, monkeypatch):
    prepare_sample()
    monkeypatch.setattr("lib.text.BATCH", 5)
    prepare("text", "small", "sample.txt", "--vocab", "vocab.txt")
    for which in SPLITS:
        big, small = (Corpus(name).split(which) for name in ("sample", "small"))
        assert np.array_equal(big, small)


def test_share_of_held_out_documents_by_default(monkeypatch):
    shares = {}
    for command in ("text a b", "wikipedia", "wikibooks"):
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *command.split()])
        shares[command[:4]] = prepare_data.parse_arguments().val_every
    assert shares == {"text": 100, "wiki": 1000}


def test_unigram_perplexity():
    train, heldout = [5, 5, 5, 6, 3], [5, 6, 7, 3, 1]
    # ordinary ids 5, 6, 7 with counts 3 + 1, 1 + 1, 0 + 1
    expected = math.exp(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)
    found = write.unigram_perplexity(
        np.bincount(train, minlength=8), np.bincount(heldout, minlength=8), (0, 1, 2, 3, 4))
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_held_out_text_has_words(workdir):
    Path("soft.txt").write_text("cat\n\n\u00ad\n\nmat\n")  # a soft hyphen is no token
    with pytest.raises(UserError, match="the documents held out as val have no word"):
        prepare("text", "new", "soft.txt", "--vocab", "vocab.txt")
    assert not Path("data/new").exists()


def many_documents():
    rng = random.Random(1)
    for file in range(3):
        Path(f"{file}.txt").write_text("\n\n".join(
            "\n".join(" ".join(rng.choices(["the", "cat", "sat", "mats", "mat."], k=5))
                      for _ in range(rng.randint(1, 4))) for _ in range(40)))
    return ["0.txt", "1.txt", "2.txt", "--vocab", "vocab.txt", "--val_every", "7"]


STOP = """
import os, signal, sys, lib.text, prepare_data
lib.text.BATCH, left, replace = 90, int(sys.argv.pop(1)), os.replace
def stop(a, b):
    global left
    left -= str(b).endswith("state.json")
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(a, b)
os.replace = stop
prepare_data.main()
"""


@pytest.mark.parametrize("vocab", ["given", "learned"])
def test_killed_and_restarted_gives_the_same_bytes(workdir, monkeypatch, capsys, vocab):
    args = many_documents()
    if vocab == "learned":
        args[3:5] = ["--vocab_size", "256"]
    monkeypatch.setattr("lib.text.BATCH", 90)
    done = []
    for kills in range(1, 20, 6):  # later and later, in the second file too
        stopped = subprocess.run([sys.executable, "-c", STOP, str(kills), "text", "new", *args],
                                 env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert stopped.returncode == -signal.SIGKILL and not Path("data/new").exists()
        done.append(json.loads(Path("data/.part_new/state.json").read_text())["lines"])
    in_first = len(list(stream(Path("0.txt"), "blank")))
    assert done == sorted(done) and 0 < done[0] < in_first < done[-1]
    capsys.readouterr()
    prepare("text", "new", *args)
    assert f"going on after {done[-1]} lines" in capsys.readouterr().out
    prepare("text", "whole", *args)
    for file in ("train.bin", "val.bin", "test.bin", "vocab.txt"):
        assert Path("data/new", file).read_bytes() == Path("data/whole", file).read_bytes()
    assert sorted(os.listdir("data")) == ["new", "whole"]
    assert len(os.listdir("data/new")) == 5


def test_unfinished_work_that_was_damaged(workdir):
    args = ["text", "new", *many_documents()]
    subprocess.run([sys.executable, "-c", STOP, "4", *args],
                   env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    file = Path("data/.part_new/train.bin")
    size = json.loads(Path("data/.part_new/state.json").read_text())["bytes"][0]
    file.write_bytes(file.read_bytes()[:size - 2])
    with pytest.raises(UserError, match="train.bin: shorter since it was left: remove"):
        prepare(*args)


def test_a_corpus_is_checked(workdir, capsys):
    prepare_sample()
    capsys.readouterr()
    prepare("check", "sample")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"data/sample/{split}.bin: as it was written" for split in SPLITS]
    meta = json.loads(Path("data/sample/meta.json").read_text())
    for split in SPLITS:
        content = Path(f"data/sample/{split}.bin").read_bytes()
        assert meta["sha256"][split] == hashlib.sha256(content).hexdigest()
    ids = Path("data/sample/train.bin").read_bytes()
    Path("data/sample/train.bin").write_bytes(ids[2:4] + ids[2:])  # ids of the vocabulary
    Corpus("sample").split("train")
    with pytest.raises(Failure, match="1 of 3 files are not as they were written"):
        prepare("check", "sample")
    assert "train.bin: DAMAGED" in capsys.readouterr().out
    Path("data/sample/train.bin").unlink()
    with pytest.raises(Failure, match="1 of 3 files are not as they were written"):
        prepare("check", "sample")
    assert "train.bin: DAMAGED: SHA-256 no file" in capsys.readouterr().out


def test_one_process_prepares_a_corpus(workdir, monkeypatch, capsys):
    with (lock(Path("data/sample"), "prepares it"),
          pytest.raises(UserError, match=f"process {os.getpid()} prepares it")):
        prepare_sample()
    prepare_sample()
    monkeypatch.setattr(prepare_data, "docstrings", lambda: 1 / 0)
    held, released = threading.Event(), []

    def first():
        with lock(Path("data/docs"), "prepares it"):
            held.set()
            time.sleep(0.5)
            shutil.copytree("data/sample", "data/docs")
            released.append(True)
    thread = threading.Thread(target=first)
    thread.start()
    held.wait()
    prepare("docs", "--if_missing")
    assert released and "waiting: process" in capsys.readouterr().out
    thread.join()
    prepare("docs", "--if_missing")
    with pytest.raises(UserError, match="data/docs exists already"):
        prepare("docs")


def test_two_at_once(workdir):
    """One makes the corpus, the other ends in one line: the same bytes as alone."""
    args = ["text", "new", *many_documents()]
    prepare("text", "alone", *args[2:])
    command = [sys.executable, ROOT / "prepare_data.py", *args]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert "".join(errors).count("\n") == 1
    for file in ("train.bin", "val.bin", "test.bin"):
        assert Path("data/new", file).read_bytes() == Path("data/alone", file).read_bytes()
    assert sorted(os.listdir("data")) == ["alone", "new"]


def merged(words, vocab, size):
    """Reference: merge the most frequent pair until there are `size` tokens; of equally frequent
    ones that with the lower ids."""
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


def test_a_vocabulary_is_a_function_of_the_text(workdir):
    """Though many pairs are equally frequent; the rarest characters are left out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 6))) for _ in range(100)]
    lines = [" ".join(rng.choices(words, k=12)) + " \u4e2d \u00c9t\u00e9, 1" for _ in range(99)]
    lines.append("x y z q r")
    counts = collections.Counter(" ".join(lines[:99]).replace("\u00c9t\u00e9,", "ete ,").split())
    vocab = [*SPECIALS, *(f"##{c}" for c in "1abcdeft"), *",1abcdeft\u4e2d"]
    expected = merged(counts, vocab, 160)
    for _ in range(4):
        assert vocabulary.train_vocab(lambda: lines, len(lines), 160) == expected


LATIN = "caf\u00e9 cat\n\nthe mat\n\nsat\n\n.\n"


def test_encodings(workdir, capsys):
    Path("t").mkdir()
    for n in range(5):
        codec = "cp1252" if n in (1, 3) else "utf-8"
        Path(f"t/{n}.txt").write_bytes(f"{'mat ' * n}{LATIN}".encode(codec))
    before = files()
    with pytest.raises(UserError, match="^t/1.txt: byte 7 is not utf-8 text; "
                                        "t/3.txt: byte 15 .*: 2 of 5 files ") as error:
        prepare("text", "t", "t", "--vocab", "vocab.txt")
    assert "\n" not in str(error.value) and files() == before
    prepare("text", "t", "t", "--encoding", "auto", "--vocab", "vocab.txt")
    assert "encodings: 3 files are utf-8, 2 files are cp1252\n" in capsys.readouterr().out
    for n in range(5):
        Path(f"t/{n}.txt").write_text(f"{'mat ' * n}{LATIN}", encoding="utf-8")
    prepare("text", "u", "t", "--vocab", "vocab.txt")
    for n in range(5):
        Path(f"t/{n}.txt").write_text(f"{'mat ' * n}{LATIN}", encoding="utf-16")
    prepare("text", "w", "t", "--encoding", "utf-16", "--vocab", "vocab.txt")
    for name in "uw":
        assert Path(f"data/{name}/train.bin").read_bytes() == Path("data/t/train.bin").read_bytes()
    Path("u").mkdir()
    Path("u/notes.md").write_text("not read")
    Path("u/9.txt").write_bytes(b"cat\x81")  # no Windows-1252 either
    for folder, encoding, words in (
            ("u", "auto", "u/9.txt: byte 3 is not cp1252 text: .*--encoding NAME"),
            ("u", "utf-16", "u/9.txt: not utf-16 text .*BOM"), ("u", "punycode", "byte 3 is not"),
            ("t", "auto", "t/0.txt: not cp1252 text .a NUL"),  # UTF-16
            ("t", "utf9", "=utf9: .* utf-16"), ("t", "rot13", "=rot13: expected auto")):
        with pytest.raises(UserError, match=words) as error:
            prepare("text", "x", folder, "--vocab", "vocab.txt", "--encoding", encoding)
        assert "\n" not in str(error.value) and not Path("data/x").exists()
    for n in range(12):
        Path(f"u/{n:02}.txt").write_bytes(b"cat\x81")
    with pytest.raises(UserError, match="09.txt: .*; and 3 more: 13 of 13 .*--skip_unreadable"):
        prepare("text", "x", "u", "--vocab", "vocab.txt", "--skip_unreadable")  # nothing is left
    shutil.copytree("t", "u/t")
    capsys.readouterr()
    prepare("text", "x", "u", "--vocab", "vocab.txt", "--skip_unreadable", "--encoding", "utf-16")
    output = capsys.readouterr().out
    assert "left out: u/9.txt: not utf-16 text" in output
    assert "encodings: 5 files are utf-16; 13 of 18 files left out" in output
    assert "u: left out: 1 .md (of a folder, only *.txt is read: name other files)" in output
    assert Path("data/x/train.bin").read_bytes() == Path("data/t/train.bin").read_bytes()


def test_a_byte_that_is_no_text_is_found(workdir):
    """Its place in the file is right, wherever the file's buffers end."""
    character = "\u4e2d".encode()
    for size in (9, 2730, 2731, 2732, 50000):
        good = character * size + b" \n" + character
        for bad in (b"\xe9 ", b"\xff"):
            Path("a.txt").write_bytes(good + bad + good)
            with pytest.raises(UserError, match=f"a.txt: byte {len(good)} is not utf-8 text"):
                list(stream(Path("a.txt"), "blank"))
        Path("a.txt").write_bytes(good[:-1])  # half a character
        with pytest.raises(UserError, match=f"a.txt: byte {len(good) - 3} is not utf-8 text"):
            list(stream(Path("a.txt"), "blank"))


def test_line_breaks_of_windows(workdir):
    Path("wiki").mkdir()
    for name in ("train", "valid", "test"):
        Path(f"wiki/wiki.{name}.tokens").write_bytes(WIKITEXT.replace("\n", "\r\n").encode())
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    assert Corpus("wikitext2").meta["documents"] == {"train": 2, "val": 2, "test": 2}
    Path("a.txt").write_bytes(b"the cat\r\nsat\r\n\r\nmat\r\n")
    assert list(stream(Path("a.txt"), "blank")) == ["the cat\n", "sat\n", None, "mat\n", None]


def test_a_line_without_end_is_read_in_pieces(workdir, monkeypatch):
    """Its ids are those of the whole line, and never is much of it held."""
    monkeypatch.setattr("lib.text.LONGEST", 2000)
    line = " ".join(random.Random(0).choices(["the", "cat,", "sat  the", "mats"], k=20000))
    for ending in ("", "\n"):
        Path("long.txt").write_text(f"{line}{ending}")
        pieces = list(stream(Path("long.txt"), "blank"))
        assert pieces.pop() is None and "".join(pieces) == f"{line}\n"
        assert len(pieces) > 40 and max(map(len, pieces)) <= 3000
    tokenizer = load_tokenizer("vocab.txt")
    ids = itertools.chain.from_iterable(tokenizer.encode(piece).ids for piece in pieces)
    assert list(ids) == tokenizer.encode(line).ids
    Path("long.txt").write_text("x" * 9000)  # nowhere to cut
    assert "".join(list(stream(Path("long.txt"), "blank"))[:-1]).strip() == "x" * 9000
    Path("long.txt").write_text("x" * 2000 + "\ncat")  # the break is the next piece's first
    assert list(stream(Path("long.txt"), "blank"))[1:] == ["x\n", "cat\n", None]


def test_other_text_starts_anew(workdir, monkeypatch):
    args = many_documents()
    subprocess.run([sys.executable, "-c", STOP, "9", "text", "new", *args],
                   env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    Path("0.txt").write_text("cat\n\n" + Path("0.txt").read_text())
    prepare("text", "new", *args)
    prepare("text", "whole", *args)
    assert (Path("data/new/train.bin").read_bytes() == Path("data/whole/train.bin").read_bytes())


def test_existing_corpus_and_force(workdir, monkeypatch):
    prepare_sample()
    old = {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    with pytest.raises(UserError, match="data/sample exists already"):
        prepare_sample()

    Path("sample.txt").write_text("mat\n\ncat\n\nsat\n\nmat cat\n\nmat sat\n")
    def dies(*args):
        raise ZeroDivisionError
    with monkeypatch.context() as patch:
        patch.setattr("lib.text._encode", dies)  # half-way
        with pytest.raises(ZeroDivisionError):
            prepare_sample("--force")
    assert {path.name: path.read_bytes() for path in Path("data/sample").iterdir()} == old

    with monkeypatch.context() as patch:  # between the two renames
        rename = os.replace
        patch.setattr(os, "replace",
                      lambda a, b: 1 / 0 if Path(b).name == "sample" else rename(a, b))
        with pytest.raises(ZeroDivisionError):
            prepare_sample("--force")
    assert not Path("data/sample").exists()

    prepare_sample()
    assert Corpus("sample").meta["documents"] == {"train": 3, "val": 1, "test": 1}
    assert os.listdir("data") == ["sample"]
    assert sorted(os.listdir("data/sample")) == sorted(old)


def test_wikitext_articles(workdir):
    Path("wiki").mkdir()
    for name in ("train", "valid", "test"):
        Path(f"wiki/wiki.{name}.tokens").write_text(WIKITEXT)
        Path(f"wiki/wiki.{name}.raw").write_text(WIKITEXT.replace("mat", "sat"))
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    corpus = Corpus("wikitext2")
    assert corpus.meta["documents"] == {"train": 2, "val": 2, "test": 2}
    assert texts_of(corpus, "val")[1] == "[UNK] [UNK] [UNK] cat"  # = Second =
    assert "mat" in texts_of(corpus, "train")[0]
    prepare("wikitext2", "--from", "wiki", "--vocab_size", "256", "--name", "other")
    assert Corpus("other").vocab_size != Corpus("wikitext2").vocab_size == corpus.vocab_size

    Path("wiki/wiki.valid.tokens").write_text("")
    with pytest.raises(UserError, match="valid.tokens: empty"):
        prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt", "--force")

    with zipfile.ZipFile("wiki.zip", "w") as archive:
        for path in Path("wiki").iterdir():
            archive.write(path, f"wikitext-2-raw/{path.name}")
    prepare("wikitext2", "--raw", "--from", "wiki.zip", "--vocab", "vocab.txt")
    raw = Corpus("wikitext2_raw")
    assert raw.meta["documents"] == corpus.meta["documents"]
    assert "mat" not in texts_of(raw, "train")[0]


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 on this machine")
def test_wikitext2_articles_as_published(workdir):
    Path("wiki").mkdir()
    for name in ("valid", "test"):
        Path(f"wiki/{name}.txt").write_bytes((SHARED / f"wikitext-2/{name}.txt").read_bytes())
    with open(SHARED / "wikitext-2/train.txt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, 3000))
    Path("wiki/train.txt").write_text("".join(lines), encoding="utf-8")
    prepare("wikitext2", "--from", "wiki", "--vocab_size", 1000)
    corpus = Corpus("wikitext2")
    assert (corpus.meta["documents"]["val"], corpus.meta["documents"]["test"]) == (60, 60)
    assert corpus.vocab_size == 1000 and corpus.special_ids == (0, 1, 2, 3, 4)
    tokenizer = load_tokenizer(corpus.folder)
    whole = tokenizer.encode(" ".join(lines)).ids  # white space is all that separates lines
    train = corpus.split("train")
    assert train[train != corpus.special_ids.sep].tolist() == whole


def test_the_papers_corpora_from_files(workdir, monkeypatch):
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


def test_a_book_twice_at_any_offset_is_found(workdir, monkeypatch):
    monkeypatch.setattr("lib.text.SENTENCES", 40)
    rng = random.Random(3)

    def book(sentences):
        return [" ".join(rng.choices(["the", "cat", "sat", "mats", "mat."], k=14))
                for _ in range(sentences)]
    twice = book(1500)
    lines = [*book(733), *twice, *book(411), *twice, *book(97)]
    Path("books.txt").write_text("\n".join(lines) + "\n")
    prepare("bookcorpus", "--from", "books.txt", "--vocab", "vocab.txt", "--val_every", 10)
    corpus = Corpus("bookcorpus")
    tokenizer = load_tokenizer(corpus.folder)
    known = {line: " ".join(tokenizer.encode(line).tokens) for line in lines}
    train = " ".join(texts_of(corpus, "train"))
    heldout = " ".join(texts_of(corpus, "val") + texts_of(corpus, "test"))
    held_out = [tokens for tokens in known.values() if tokens in heldout]
    assert 300 < len(held_out) < 1500 and not any(tokens in train for tokens in held_out)
    again = sum(train.count(known[line]) == 2 for line in twice)
    assert again < 300 and corpus.meta["duplicates"] > 20  # its ends share documents with others
    missing = sum(tokens not in train and tokens not in heldout for tokens in known.values())
    assert missing < 300  # cut by a document's end


def test_an_archive_of_the_same_name_is_another(workdir):
    for name, sentence in (("a", "the cat"), ("b", "the mat")):
        Path(name).mkdir()
        Path("books.txt").write_text(f"{sentence}\nsat\ncats\nmats\nmat sat\n\nsat .\n\nmat\n\n.\n")
        with tarfile.open(f"{name}/bookcorpus.tar.bz2", "w:bz2") as archive:
            archive.add("books.txt")
        for _ in range(2):
            prepare("bookcorpus", "--from", f"{name}/bookcorpus.tar.bz2", "--vocab", "vocab.txt",
                    "--force")
            assert sentence in texts_of(Corpus("bookcorpus"), "train")[0]
    assert len(os.listdir("data/downloads")) == 2


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="a.parquet needs a package: pip install pyarrow"):
        list(_rows(Path("a.parquet"), []))


def test_docs_from_source(workdir, monkeypatch):
    """Docstrings come in the source's order, from a tree that is never imported."""
    tree = ast.parse(
        '"""Module.\n\n    Indented."""\nimport nothing_like_it\nclass A:\n    "Class."\n'
        'try:\n    pass\nexcept E:\n    def f():\n        """Function."""\n'
        'abs = _C._add_docstr(torch.abs, r"""\nabs(x)\n\n    more {x}""".format(x=1))\n'
        'add_newdoc("A", ("b", """\n    b()"""))\n'
        'call("""not\na docstring""")\nasync def g():\n    "Last."\n')
    found = list(filter(None, _docstrings(tree)))
    assert found == [
        "Module.\n\nIndented.", "Class.", "Function.", "abs(x)\n\n    more {x}", "b()",
        "Last."]

    library = workdir / "library"
    (library / "tests").mkdir(parents=True)
    for number in range(40):  # one docstring of each is the same
        (library / f"m{number:02}.py").write_text(f'"Number {number}."\ndef f():\n    "Same."\n')
    (library / "tests/m.py").write_text('"""A test."""')
    (library / "bad.py").write_text('"""Bad."""\ndef')
    (library / "odd.py").write_text('"""Odd \\ud800 \\d"""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    empty = type("Spec", (), {"origin": str(workdir / "nowhere/__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    vocab = PIECES + ["number", "same", *map(str, range(40)), "odd", "?"]
    Path("vocab.txt").write_text("\n".join(vocab) + "\n")
    prepare("docs", "--vocab", "vocab.txt")
    corpus = Corpus("docs")
    assert corpus.meta["documents"] == {"train": 37, "val": 2, "test": 2}
    assert load_tokenizer(corpus.folder).decode(corpus.split("val")) == "number 18. number 38."
    assert load_tokenizer(corpus.folder).decode(corpus.split("train")).count("same.") == 1

    prepare("docs_task")  # its dev is the corpus's val
    rows = {split: Path(f"data/docs_task/{split}.tsv").read_text().splitlines()
            for split in ("train", "dev", "test")}
    assert rows["dev"] == ["sentence\tlabel", "Number 18.\tPython", "Number 38.\tPython"]
    assert rows["test"] == ["index\tsentence", "0\tNumber 19.", "1\tNumber 39."]
    assert rows["train"][1:4] == ["Number 0.\tPython", "Same.\tPython", "Number 1.\tPython"]
    with pytest.raises(UserError, match="data/docs_task exists already"):
        prepare("docs_task")
    (library / "m38.py").write_text('"Number 38.\\n\\nMore."\ndef f():\n    '
                                    '"Number 0.\\n\\nMore."\n')
    (library / "m39.py").write_text('"Number 0.\\n\\nAgain."\n')
    shutil.rmtree("data/docs_task")
    prepare("docs_task")  # "Number 0." is in train
    assert Path("data/docs_task/dev.tsv").read_text().splitlines() == rows["dev"]
    assert Path("data/docs_task/test.tsv").read_text().splitlines() == rows["test"][:2]


def test_a_line_of_parquet_may_end_as_on_windows(workdir):
    write_parquet("a.parquet", ["the cat\r\nsat\r\n", "mat"])
    assert list(stream(Path("a.parquet"), "blank")) == ["the cat\n", "sat\n", None, "mat\n", None]


def test_wikitext_keeps_its_official_splits(workdir):
    Path("wiki").mkdir()
    for name, words in (("train", "the cat"), ("valid", "the mat"), ("test", "sat")):
        Path(f"wiki/wiki.{name}.tokens").write_text(f" {words} \n")
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    assert [texts_of(Corpus("wikitext2"), split) for split in SPLITS] == [
        ["the cat"], ["the mat"], ["sat"]]


def test_a_row_of_parquet_is_a_document_whatever_else_is(workdir):
    write_parquet("a.parquet", ["the cat\n\nsat", "mat"])
    for kind in ("blank", "file"):
        assert list(stream(Path("a.parquet"), kind)) == [
            "the cat\n", "sat\n", None, "mat\n", None]


def test_sizes_of_learned_vocabularies(workdir, monkeypatch):
    """As --help says them; a file that is named twice is read once."""
    written = {}
    monkeypatch.setattr(prepare_data, "write_corpus",
                        lambda name, origin, sources, vocab, *more, **other:
                        written.update({name: (vocab, len(sources))}))
    monkeypatch.setattr(prepare_data, "docstrings", lambda: ("somewhere", []))
    prepare("docs")
    prepare("text", "a", "sample.txt", "sample.txt", ".")
    prepare("text", "b", "vocab.txt", "--vocab_size", 300)
    assert written == {"docs": (4096, 1), "a": (8192, 2), "b": (300, 1)}


def test_gpt2_corpus_and_run(place, gpt2_files, capsys, monkeypatch):
    """From text to filled-in masks and an exported tokenizer, with GPT-2's vocabulary."""
    prepare("text", "bytes", "text.txt", "--tokenizer", "gpt2")
    prepare("text", "again", "text.txt", "--vocab", "data/bytes")
    for file in ("tokenizer.json", "train.bin", "vocab.txt"):
        assert Path("data/again", file).read_bytes() == Path("data/bytes", file).read_bytes()
    corpus = Corpus("bytes")
    assert corpus.vocab_size == 50261 and corpus.special_ids == (50259, 50256, 50257, 50258, 50260)
    documents = Path("text.txt").read_text().split("\n\n")
    reference = byte_level_bpe(gpt2_files)  # of lines with their line breaks
    expected = [i for line in documents[58].splitlines()
                for i in reference.encode(line + "\n").ids]
    assert corpus.split("val").tolist()[-len(expected) - 1:] == [*expected, 50258]
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")  # a corpus and a run bring their own vocabulary
    assert train("--dataset=bytes", "--max_steps=2", "--out=out/bytes") == 0
    capsys.readouterr()
    measure.main(["fill", "out/bytes", "the [MASK] cat"])
    assert "[MASK] at token 2:" in capsys.readouterr().out
    assert_one_line(capsys, "tiny.py", "--out=out/bytes", words=["another vocabulary"])
    assert train("--dataset=bytes", "--max_steps=2", "--out=out/plain", "--memory_layers=") == 0
    transformers = pytest.importorskip("transformers")
    export("out/plain", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    assert tokenizer("a <mask> dog")["input_ids"] == [50257, 64, 50260, 3290, 50258]
    assert tokenizer.mask_token_id == 50260 and tokenizer.pad_token_id == 50259
