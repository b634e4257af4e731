"""
Text as a stream: its lines, each with its line break, and None at the end of every document.

>>> files = find_files(Path("books"), ".txt")
>>> codecs = find_codecs(files, "utf-8")            # UserError if one of them is not UTF-8
>>> for line in stream(files[0], "blank", codecs[files[0]]): ...
>>> source, packages = docstrings()                 # of the installed Python, torch and numpy
"""
import ast
import codecs
import collections
import importlib.util
import inspect
import itertools
import re
import sys
import sysconfig
import warnings
import zlib
from functools import partial
from pathlib import Path

from lib.common.errors import UserError, need
from lib.common.progress import Progress
from lib.corpus.download import damaged

LONGEST = 2**20  # characters of a line, or bytes of a file, that are held at once
SENTENCES = 1000  # BookCorpus: of a document, in the mean
BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
CODECS = {"utf-8": "UTF-8", "cp1252": "Windows-1252"}  # --encoding auto tries them in this order


def find_files(path, *suffixes):
    """`path`, or the files in the folder `path` that end in one of `suffixes`."""
    files = [path] if path.is_file() else sorted(
        inside for inside in path.rglob("*") if inside.suffix in suffixes)
    if not files:
        raise UserError(f"{path}: no such file, or a folder without *{' or *'.join(suffixes)}")
    return files


def find_codecs(files, encoding):
    """{file: codec} of text files. Each is read through: UserError if one is not text in its codec.
    encoding: a codec, or 'auto': UTF-8, else Windows-1252; then it prints how many are which."""
    auto, found, wrong = encoding == "auto", {}, []
    try:
        "".encode("utf-8" if auto else encoding)
    except (LookupError, ValueError):
        raise UserError(f"--encoding={encoding}: expected auto or an encoding that Python knows, "
                        "such as utf-8, cp1252, utf-16") from None
    for file in Progress(files, desc="checking the encoding", unit=" files"):
        for codec in CODECS if auto else [encoding]:
            if not _flaw(file, codec):
                found[file] = codec
                break
        else:
            wrong.append(file)
    if wrong:
        hint = "" if auto else (": --encoding auto reads such files as Windows-1252, "
                                "--encoding NAME reads all files in that encoding")
        raise UserError(f"{wrong[0]}: {_flaw(wrong[0], 'utf-8' if auto else encoding)} "
                        f"({len(wrong)} of {len(files)} files are not){hint}")
    if auto:
        print("encodings: " + ", ".join(f"{count:,} files are {CODECS[codec]}" for codec, count in
                                        collections.Counter(found.values()).items()))
    return found


def _flaw(path, codec):
    """Where a file is not text in a codec, in words, or None."""
    decoder, done = codecs.getincrementaldecoder(codec)(), 0
    with path.open("rb") as file:
        for chunk in itertools.chain(iter(partial(file.read, LONGEST), b""), [b""]):
            at = done - len(decoder.getstate()[0])  # less the bytes of an unfinished character
            try:
                text, bad = decoder.decode(chunk, final=not chunk), 0
                if "\0" not in text:
                    done += len(chunk)
                    continue
                at += len(text[:text.index("\0")].encode(codec))
            except UnicodeDecodeError as error:
                at, bad = at + error.start, error.object[error.start]
            return f"byte {at} is {bad:#04x}, not {CODECS.get(codec, codec)} text"
    return None


def _lines(path, codec):
    """The lines of a text file, a very long one in pieces that end between two words. UserError at
    a byte that is no text."""
    rest = ""
    try:
        with path.open(encoding=codec, newline="\n") as file:
            while part := file.readline(LONGEST):
                line = (rest + part).replace("\r\n", "\n")
                rest = ""
                if "\0" in line:
                    raise ValueError("binary")
                if len(part) == LONGEST and part[-1] != "\n":
                    cut = BETWEEN_WORDS.search(line, len(line) - 1000)
                    at = cut.start() if cut else len(line)
                    line, rest = line[:at], line[at:]
                elif part[-1] != "\n":
                    line += "\n"
                yield line
    except ValueError:  # as a byte is that cannot be decoded
        raise UserError(f"{path}: {_flaw(path, codec)}") from None
    if rest:
        yield rest + "\n"


def _rows(path, between):
    """The lines in column `text` of a .parquet file, without blank ones; `between` after a row."""
    parquet = need("pyarrow.parquet", f"{path}")
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UserError(f"{path}: no column 'text' in it")
            for batch in file.iter_batches(1000, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    for line in filter(str.strip, (text or "").split("\n")):
                        yield f"{line}\n".replace("\r\n", "\n")
                    yield from between
    except UserError:
        raise
    except (ValueError, OSError) as error:  # pyarrow's own errors are one or the other
        raise damaged(path, str(error).splitlines()[0]) from None


def stream(path, kind, codec="utf-8"):
    """A file as a stream, without its blank lines. kind: documents end at a 'blank' line, with the
    'file', before a title in 'wikitext', or, in 'sentences', at a blank line and as below. Of
    .parquet a row is a document, or in 'sentences' a line.

    'sentences' is for BookCorpus: a sentence a line, without book boundaries, and about a third of
    its books in it more than once (Bandy and Vincent, 2021). A document ends where the hash of
    two lines says so, after SENTENCES lines in the mean. So a second copy of a book is cut at the
    same places, wherever it stands, and its documents but the first and the last, which it shares
    with its neighbours, are found to be duplicates.
    """
    if path.suffix == ".parquet":
        lines = _rows(path, [] if kind == "sentences" else [""])
        kind = "blank" if kind == "file" else kind
    else:
        lines = _lines(path, codec)
    before, line, length = "", "", 0
    for after in itertools.chain(lines, [""]):  # the last line has an empty one after it
        if kind == "wikitext":
            # " = Title = ", not " = = Section = = ". Lines of tables look like it, but have no
            # blank lines around: so WikiText-2 has 600, 60 and 60 articles, as published
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
    """Where the docstrings are from, and the (package, docstrings) of every file that has some;
    each docstring once."""
    folders = {f"Python {sys.version.split()[0]}": sysconfig.get_path("stdlib")}
    for package in ("torch", "numpy"):
        folder = Path(importlib.util.find_spec(package).origin).parent
        folders[f"{package} {importlib.metadata.version(package)}"] = folder
    # not other packages, and no tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [(name.split()[0], file) for name, folder in folders.items()
             for file in sorted(Path(folder).rglob("*.py"))
             if skip.isdisjoint(file.relative_to(folder).parts)]
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        for package, file in Progress(files, desc="reading docstrings", unit=" files"):
            try:
                texts = dict.fromkeys(_docstrings(ast.parse(file.read_bytes())))
            except (SyntaxError, ValueError, RecursionError):
                continue  # a template, or meant for another Python
            new = [text for text in texts if text and text not in seen]
            seen.update(new)
            if new:  # a lone surrogate has no UTF-8
                documents.append((package, [text.encode("utf-8", "replace").decode()
                                            for text in new]))
    return f"docstrings of {', '.join(folders)}", documents


def _docstrings(node):
    """Docstrings in a syntax tree, in its order, and those attached by calls such as
    add_newdoc(...) and fft = _add_docstr(_fft.fft_fft, '''...''')."""
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
