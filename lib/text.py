"""
Read text as a stream: lines with line breaks, and None where a document ends.

>>> files = find_files(Path("books"), ".txt")
>>> codecs = find_codecs(files, "auto")             # UTF-8 or Windows-1252
>>> for line in stream(files[0], "blank", codecs[files[0]]): ...
>>> source, packages = docstrings()                 # of the installed Python, torch and numpy
"""
import ast
import collections
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib import tokenizer as vocabulary
from lib.corpus import SPLITS, Corpus
from lib.device import Progress
from lib.download import damaged, file_sha256
from lib.errors import UserError, need
from lib.files import discard, read_json, write_text

LONGEST = 2**16  # characters of a line, or bytes of a file, that are held at once
SENTENCES = 1000  # mean length of a BookCorpus document, in lines
BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


def find_files(path, *suffixes):
    """Return [path], or the files in the folder `path` that end in one of `suffixes`. Print how
    many others are in the folder, by suffix."""
    inside = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
    files = [file for file in inside if file.suffix.lower() in suffixes or file == path]
    others = collections.Counter(file.suffix or "without suffix"
                                 for file in set(inside) - set(files))
    if not files:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        raise UserError(f"{path}: no *{' or *'.join(suffixes)} among its {len(inside)} files")
    if others:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common(5))
        print(f"{path}: left out: {counts} (of a folder, only *{' and *'.join(suffixes)} is read: "
              "name other files)")
    return files


def find_codecs(files, encoding, skip_unreadable=False):
    """Read text files to the end to find the codec of each: {file: codec}. Print their numbers.

    encoding: a codec for all files, or 'auto': UTF-8, else Windows-1252. UserError that names the
    files that are no such text. With skip_unreadable they are left out and printed."""
    codecs = ["utf-8", "cp1252"] if encoding == "auto" else [encoding]
    try:
        "".encode(codecs[0])
    except (LookupError, ValueError):
        raise UserError(f"--encoding={encoding}: expected auto or an encoding that Python knows, "
                        "such as utf-8, cp1252, utf-16") from None
    codec_of, flaws = {}, []
    for file in Progress(files, desc="finding encodings", unit=" files"):
        why = {codec: _flaw(file, codec) for codec in codecs}
        if readable := [codec for codec, flaw in why.items() if not flaw]:
            codec_of[file] = readable[0]
        else:
            flaws.append(why[codecs[-1]])
    count = f"{len(flaws):,} of {len(files):,} files"
    if flaws and not (skip_unreadable and codec_of):
        more = f"; and {len(flaws) - 10:,} more" if len(flaws) > 10 else ""
        raise UserError(f"{'; '.join(flaws[:10])}{more}: {count} cannot be read: --encoding auto "
                        "reads files that are not UTF-8 as Windows-1252, --encoding NAME reads "
                        "another encoding, --skip_unreadable leaves such files out")
    for flaw in flaws:
        print(f"left out: {flaw}")
    numbers = collections.Counter(codec_of.values()).items()
    print(f"encodings: {', '.join(f'{number:,} files are {codec}' for codec, number in numbers)}"
          + (f"; {count} left out" if flaws else ""))
    return codec_of


def _flaw(file, codec):
    """Return why a file is no text in this encoding, or None."""
    try:
        collections.deque(_lines(file, codec), maxlen=0)  # read it and keep nothing
    except UserError as error:
        return str(error)
    return None


def _lines(path, codec):
    """Yield the lines of a text file, a long one in pieces cut between words."""
    rest = ""
    with path.open(encoding=codec, newline="\n") as file:
        try:
            while piece := file.readline(LONGEST):
                line, rest = (rest + piece).replace("\r\n", "\n"), ""
                if "\0" in line:
                    raise UnicodeError("a NUL character")
                if piece[-1] != "\n" and len(piece) == LONGEST:
                    cut = BETWEEN_WORDS.search(line, len(line) - 1000)
                    end = cut.start() if cut else len(line) - 1  # keep one: "\n" may be next
                    line, rest = line[:end], line[end:]
                yield line if line[-1] == "\n" or rest else f"{line}\n"
        except UnicodeDecodeError as error:
            byte = file.buffer.tell() - len(error.object) + error.start
            raise UserError(f"{path}: byte {byte} is not {codec} text") from None
        except UnicodeError as error:
            raise UserError(f"{path}: not {codec} text ({error})") from None
    if rest:
        yield f"{rest}\n"


def _rows(path, between):
    """Yield the lines in a .parquet file's column `text`, and `between` after each row."""
    parquet = need("pyarrow.parquet", f"{path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=["text"]):
                for text in batch["text"].to_pylist():
                    if not isinstance(text, str | None):
                        raise TypeError("no texts in the column 'text'")
                    for line in filter(str.strip, (text or "").split("\n")):
                        yield f"{line}\n".replace("\r\n", "\n")
                    yield from between
    except KeyError:
        raise UserError(f"{path}: no column 'text' in it") from None
    except (TypeError, ValueError, OSError) as error:  # pyarrow's own are of the last two
        raise damaged(path, str(error).splitlines()[0]) from None


def stream(path, kind, codec="utf-8"):
    """Yield the lines of a file, and None where a document ends. Blank lines are left out.

    kind: documents end at a 'blank' line, with the 'file', or before a title in 'wikitext'. A
    .parquet row is a document; with 'sentences', a line.

    'sentences' is for BookCorpus. It has a sentence a line and no book boundaries, and a third of
    its books are in it more than once (Bandy and Vincent, 2021). A document ends at a blank line,
    or where the hash of two lines says so, after SENTENCES lines in the mean. All copies of a book
    are then cut at the same places, and only their first and last documents differ.
    """
    if path.suffix == ".parquet":
        lines = _rows(path, [] if kind == "sentences" else [""])
        kind = "blank" if kind == "file" else kind
    else:
        lines = _lines(path, codec)
    before, line, length = "", "", 0
    for after in itertools.chain(lines, [""]):  # the last line has an empty one after it
        if kind == "wikitext":
            # " = Title = ", not " = = Section = = ". Lines of tables look like titles, but have no
            # blank lines around them. WikiText-2 has 600, 60 and 60 articles, as published.
            ends = not before.strip() and not after.strip() and re.match(r" = (?!= ).* = $", line)
        else:
            ends = kind != "file" and not line.strip()
        if length and ends:
            yield None
            length = 0
        if line.strip():
            yield line
            length += 1
            if kind == "sentences" and zlib.crc32((before + line).encode()) % SENTENCES == 0:
                yield None
                length = 0
        before, line = line, after
    if length:
        yield None


def docstrings():
    """Return the packages' versions in words, and [(package, docstrings)], one pair per file. Each
    docstring comes once. Files without new docstrings are left out."""
    folders = {f"Python {sys.version.split()[0]}": sysconfig.get_path("stdlib")}
    for package in ("torch", "numpy"):
        folder = Path(importlib.util.find_spec(package).origin).parent
        folders[f"{package} {importlib.metadata.version(package)}"] = folder
    # Other packages are left out, and tests, whose docstrings are mostly one-line labels.
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [(name.split()[0], file) for name, folder in folders.items()
             for file in sorted(Path(folder).rglob("*.py"))
             if skip.isdisjoint(file.relative_to(folder).parts)]
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        for package, file in Progress(files, desc="reading docstrings", unit=" files"):
            try:
                texts = dict.fromkeys(text.encode("utf-8", "replace").decode()  # no lone surrogates
                                      for text in _docstrings(ast.parse(file.read_bytes())))
            except (SyntaxError, ValueError, RecursionError):
                continue  # a template, or meant for another Python
            new = [text for text in texts if text and text not in seen]
            seen.update(new)
            if new:
                documents.append((package, new))
    return f"docstrings of {', '.join(folders)}", documents


def _docstrings(node):
    """Yield the docstrings of a syntax tree, in its order. Calls such as add_newdoc(...) and fft =
    _add_docstr(_fft.fft_fft, '''...''') attach some."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(call := getattr(child, "value", None), ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if re.match("_?add_(docstr|newdoc)", name):
                yield from (inspect.cleandoc(part.value) for part in ast.walk(call)
                            if isinstance(part, ast.Constant) and "\n" in str(part.value))
        elif not isinstance(child, ast.expr):
            yield from _docstrings(child)


BATCH = 2**21  # characters encoded at once, or ids read at once: some 100 MB


class Source(NamedTuple):
    """A file of a corpus, or another source of its text."""
    name: str
    read: Callable  # returns a new stream of the text (see text.py)
    split: str | None = None  # the official split; None where documents are to be held out
    drop_heldout: bool = False  # leave sentences of val and test out of train


def write_corpus(name, origin, sources, vocab, val_every=0):
    """Write data/<name>/, whole or not at all, and print its content.

    origin: where the text is from, in words. sources: a list of Source.
    vocab: the tokens by id, or how many to learn from the training documents.
    val_every: one document of this many is for val, one for test, and only the first of equal
    documents is kept. With 0 the sources have their official splits, and all documents are kept.
    UserError for a source without text. Unfinished work is in data/.part_<name>/. The next call
    with the same text goes on from there, and writes the same bytes.
    """
    counts, hashes, n_lines = _hash_documents(sources)
    splits = _assign_splits(sources, counts, hashes, val_every)
    heldout = _heldout_sentences(sources, counts, splits)
    folder, work = Path("data", name), Path("data", f".part_{name}")
    task = repr(vocab).encode() + hashes.tobytes() + splits.tobytes()
    task = hashlib.sha256(task).hexdigest()
    state = read_json(work / "state.json") if (work / "state.json").exists() else {}
    if state.get("task") == task:
        print(f"{work}: going on after {state['lines']:,} lines")
    else:
        discard(work)
        state = {"task": task, "lines": 0, "bytes": [0, 0, 0]}
        if isinstance(vocab, int):
            def read_train():
                lines = _read_lines(sources, splits, heldout)
                return (line for line, split in lines if split == 0 and line)
            vocab = vocabulary.train_vocab(read_train, n_lines, vocab)
        vocabulary.write_vocab(work, vocab)
    vocab = vocabulary.read_vocab(work)
    lines = itertools.islice(_read_lines(sources, splits, heldout), state["lines"], None)
    _encode(work, state, Progress(lines, desc=f"encoding {name}", total=n_lines,
                                  initial=state["lines"], unit=" lines"))
    facts = vocabulary.vocab_facts(vocab)
    ids = {split: _count_ids(work / f"{split}.bin", len(vocab)) for split in SPLITS}
    no_words = [facts[key] for key in ("pad_id", "cls_id", "sep_id", "mask_id")]
    write_text(work / "meta.json", json.dumps({
        "name": name, "source": origin, **facts, "duplicates": int((splits < 0).sum()),
        "unigram_perplexity": unigram_perplexity(ids["train"], ids["val"], no_words),
        "documents": {split: int(count[facts["sep_id"]]) for split, count in ids.items()},
        "tokens": {split: int(count.sum()) for split, count in ids.items()},
        "unknown": {split: int(count[facts["unk_id"]]) for split, count in ids.items()},
        "sha256": {split: file_sha256(work / f"{split}.bin") for split in SPLITS},
    }, indent=1) + "\n")
    discard(folder)
    os.replace(work, folder)
    discard(folder / "state.json")
    _print_summary(Corpus(name))


def _hash_documents(sources):
    """Read the text once, and count and hash its documents. Returns the number of documents of each
    source, every document's hash of 8 bytes, and the number of lines. Among 10 million documents,
    two different ones have the same hash with probability 3e-6."""
    counts, hashes = [], bytearray()
    with Progress(desc="reading", unit=" lines") as progress:
        for source in sources:
            before, document = len(hashes), hashlib.blake2b(digest_size=8)
            for line in source.read():
                progress.update()
                if line is None:
                    hashes += document.digest()
                    document = hashlib.blake2b(digest_size=8)
                else:
                    document.update(line.encode())
            counts.append((len(hashes) - before) // 8)
            if not counts[-1]:
                raise UserError(f"{source.name}: empty: no text in it")
    return counts, np.frombuffer(hashes, "<u8"), progress.n


def _assign_splits(sources, counts, hashes, val_every):
    """Return every document's index in SPLITS, or -1 for a duplicate: int8 (documents,)."""
    if not val_every:
        official = [SPLITS.index(source.split) for source in sources]
        return np.repeat(official, counts).astype(np.int8)
    firsts = np.sort(np.unique(hashes, return_index=True)[1])  # the first of equal documents
    if len(firsts) < 3:
        raise UserError(f"{sources[0].name}: {len(firsts)} documents in all: it takes 3 different "
                        "ones to have one for val and one for test")
    period = min(len(firsts), val_every)
    place = np.arange(len(firsts)) % period
    splits = np.full(len(hashes), -1, np.int8)
    splits[firsts] = (place == period - 2) + 2 * (place == period - 1)
    return splits


def _heldout_sentences(sources, counts, splits):
    """Return the lines of val and test that train must not repeat: a set, held in memory."""
    drops = [source.drop_heldout for source in sources]
    lines = _read_lines(itertools.compress(sources, drops), splits[np.repeat(drops, counts)])
    return {line for line, split in lines if split > 0 and line}


def _read_lines(sources, splits, heldout=frozenset()):
    """Yield (line, split) for all of the text. split: of the line's document; -1 for a line to
    leave out. It is in a duplicate or, in train, it is one of the `heldout` sentences."""
    document = 0
    for source in sources:
        for line in source.read():
            split = splits[document]
            repeated = source.drop_heldout and split == 0 and line in heldout
            yield line, -1 if repeated else split
            document += line is None


def _encode(work, state, lines):
    """Append ids to work/{train,val,test}.bin, and keep `state` beside them, up to date. lines:
    (line, split) of the text that is not encoded yet."""
    tokenizer = vocabulary.text_tokenizer(work)
    sep_id = vocabulary.special_ids(tokenizer).sep
    files = [work / f"{split}.bin" for split in SPLITS]
    for file, size in zip(files, state["bytes"]):
        file.touch()
        if file.stat().st_size < size:
            raise UserError(f"{file}: shorter since it was left: remove {work}")
        os.truncate(file, size)
    for batch in _batches(lines):
        for split, path in enumerate(files):
            texts = [line for line, its_split in batch if its_split == split]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ids = (encoding.ids if text else [sep_id]
                   for text, encoding in zip(texts, encodings))
            with open(path, "ab") as file:
                file.write(np.fromiter(itertools.chain.from_iterable(ids), "<u2").tobytes())
                file.flush()
                os.fsync(file.fileno())
                state["bytes"][split] = file.tell()
        state["lines"] += len(batch)
        write_text(work / "state.json", json.dumps(state))


def _batches(lines):
    """Yield lists of (line, split) with about BATCH characters each. A document ends with ""."""
    batch, length = [], 0
    for line, split in lines:
        batch.append((line or "", split))
        length += len(line or "")
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    yield batch


def _count_ids(file, vocab_size):
    """Count how often each id occurs in a .bin file: (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    with open(file, "rb") as source:
        while len(ids := np.fromfile(source, "<u2", BATCH)):
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


def unigram_perplexity(train, heldout, special_ids):
    """Return the held-out perplexity of train's token frequencies, add-one smoothed. It is None
    without training text. train, heldout: how often each id occurs, (vocab_size,). special_ids: ids
    to leave out."""
    if not train.any():
        return None
    train, heldout = (np.delete(counts, special_ids) for counts in (train + 1, heldout))
    if not heldout.any():
        raise UserError("the documents held out as val have no word: take more text, or another "
                        "--val_every")
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


def _print_summary(corpus):
    """Print what is in a corpus."""
    meta = corpus.meta
    print(f"{corpus.folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {meta['duplicates']:,} duplicate documents left out; "
          f"{meta['source']}")
    for split, tokens in meta["tokens"].items():
        unknown = meta["unknown"][split] / max(tokens, 1)
        print(f"{corpus.folder}/{split}.bin: {meta['documents'][split]:,} documents, "
              f"{tokens:,} tokens, {unknown:.3%} unknown")
