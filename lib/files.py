"""
Write files that are whole or absent, lock folders, and read and format tables.
"""
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path

import filelock
import torch

from lib.ranks import first_rank
from lib.settings import UserError, find_refusal


@contextlib.contextmanager
def atomic(path):
    """Write a file or a folder that is whole or absent, even after a kill.

    Yields a temporary path beside `path`. At the end it is flushed to disk and renamed to `path`,
    or removed if there was an error. An existing file is replaced; an existing folder is an error.
    Under torchrun only the first rank writes.
    """
    path = Path(path)
    if not first_rank():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder, path.name)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    discard(temporary)  # a killed process may have left it
    try:
        with named(path):
            yield temporary
            for written in (temporary, *temporary.rglob("*")):
                if written.is_file():
                    with open(written, "rb+") as file:
                        os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        discard(temporary)


@contextlib.contextmanager
def named(path):
    """Name a file in an error of the operating system, because an error of writing names none."""
    try:
        yield
    except Exception as error:
        refusal = find_refusal(error)
        if refusal:
            refusal.filename = refusal.filename or str(path)
        raise


@contextlib.contextmanager
def lock(folder, work, timeout=0):
    """Let one process at a time work in a folder, which need not exist yet.

    `work` is what the process does: "trains there". A second process gets a UserError, or waits
    if timeout is -1. The lock ends with its process, even after a kill. Under torchrun the first
    rank takes it.
    """
    if not first_rank():
        yield
        return
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f".lock_{folder.name}"
    try:
        with named(file):  # a soft lock would outlive a process that is killed
            held = filelock.FileLock(file, timeout, fallback_to_soft=False).acquire()
    except filelock.Timeout:
        raise UserError(f"{folder}: another process {work}: one at a time") from None
    with held:
        yield


def load_file(path):
    """Load tensors, saved as .safetensors or by torch.save. Runs no code. Maps a .pt file."""
    load = partial(torch.load, map_location="cpu", weights_only=True, mmap=path.suffix == ".pt")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file as load
    try:
        return load(path)
    except Exception as error:
        if "allocate memory" in str(error):
            raise
        raise UserError(f"{path}: missing, truncated, damaged or no file of tensors "
                        f"({type(error).__name__})") from None


def to_json(content, indent=None):
    """Format as JSON. It knows only finite numbers, so nan and infinity become null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent)


def null_to_nan(content):
    """Turn the null values of a JSON object into nan; for json's `object_hook`."""
    return {key: math.nan if value is None else value for key, value in content.items()}


def read_json(path, object_hook=None):
    """Read a JSON file; UserError if it is damaged, or a text in it is not UTF-8."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=object_hook)
        json.JSONEncoder(ensure_ascii=False).encode(content).encode()
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({error})") from None


def write_text(path, text):
    """Write a text file that is whole or absent (see atomic)."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def discard(path):
    """Remove a file, a link or a folder, if it is there."""
    if not first_rank():
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_sha256(path):
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def markdown(header, rows):
    """Format a Markdown table with aligned columns. A float gets two decimals, None is empty."""
    def text(cell):
        if cell is None:
            return ""
        if isinstance(cell, float):
            return f"{cell:.2f}"
        return str(cell).replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in rows)


def read_table(path, columns=None, skip_broken=False):
    """Read a TSV file: its rows, dicts by column. Quotes are ordinary characters.

    columns: their names if the file may have no header. A first line that has them all is one. A
    row with more or fewer fields is a UserError; skip_broken leaves it out, as QQP's files need it.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no readable UTF-8 file ({error})") from None
    rows = []
    for number, line in enumerate(text.rstrip("\r\n").split("\n"), 1):
        fields = line.rstrip("\r").split("\t")
        if number == 1 and set(columns or ()) <= set(fields):
            columns = fields
            if len(set(columns)) < len(columns):
                raise UserError(f"{path}:1: columns {columns}: two have the same name")
        elif len(fields) == len(columns):
            rows.append(dict(zip(columns, fields)))
        elif not skip_broken:
            raise UserError(f"{path}:{number}: {len(fields)} fields, expected {len(columns)} with "
                            "tabs between them")
    if not rows or not text.strip():
        raise UserError(f"{path}: no row in it (the first line of a .tsv names the columns)")
    return rows


def tsv_text(rows):
    """Join rows, dicts by column, to the text of a TSV file. A tab in a cell becomes a space."""
    lines = ["\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row)
             for row in (rows[0], *map(dict.values, rows))]
    return "\n".join(lines) + "\n"
