"""
Read text as a stream: lines with line breaks, and None where a document ends.

>>> files = find_files(Path("books"), ".txt")
>>> codecs = find_codecs(files, "auto")             # UTF-8 or Windows-1252
>>> for line in stream(files[0], "blank", codecs[files[0]]): ...
>>> source, packages = docstrings()                 # of the installed Python, torch and numpy
"""
import ast
import collections
import importlib.util
import inspect
import itertools
import re
import sys
import sysconfig
import warnings
import zlib
from pathlib import Path

from lib.common.errors import UserError, need
from lib.common.progress import Progress
from lib.corpus.download import damaged

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
