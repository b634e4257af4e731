"""
Files that are never half written, and locks.
"""
import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from lib.common.errors import UserError, need
from lib.common.torchrun import first_rank


@contextlib.contextmanager
def atomic(path):
    """Give a temporary path beside `path` to write a file or a folder to; at the end what was
    written is flushed to disk and renamed to `path`, or removed if writing failed. So `path` is
    whole or absent, whenever the process is killed. An existing file is replaced, an existing
    folder is an error. Of torchrun's processes only the first one writes."""
    path = Path(path)
    if not first_rank():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder, path.name)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    discard(temporary)  # a killed process may have left it
    try:
        yield temporary
        for file in [temporary] if temporary.is_file() else sorted(temporary.rglob("*")):
            if file.is_file():
                with open(file, "rb+") as handle:
                    os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        discard(temporary)


@contextlib.contextmanager
def lock(path, what, wait=False):
    """Let one process at a time into a with block for `path`, a folder that need not exist yet. A
    second one ends with a UserError that names the first, or with `wait` it waits. The lock is
    flock's, on a file beside the folder: it ends with its process, even one that is killed.

    what: what the first process does, for the second one's line: "trains there". Of torchrun's
    processes the first has the lock for all."""
    if not first_rank():
        yield
        return
    path = Path(path).resolve()
    file, new = path.with_name(f".lock_{path.name}"), [p for p in path.parents if not p.exists()]
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = file.open("a+")
            _flock(handle, path, what, wait)
            if os.path.samestat(os.fstat(handle.fileno()), file.stat()):
                break
        except (FileNotFoundError, FileExistsError):  # the last holder removes file and folder
            if file.parent.exists() and not file.parent.is_dir():
                raise
    handle.truncate(0)
    print(os.getpid(), file=handle, flush=True)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        handle.close()
        with contextlib.suppress(OSError):  # not empty
            for folder in new:
                folder.rmdir()


def _flock(handle, path, what, wait):
    told = False
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip()  # empty at first: the lock comes before the number
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            return print(f"warning: {path.parent}: no locks on this file system "
                         f"({error.strerror}): start no second process for {path.name}")
        if holder and not wait:
            raise UserError(f"{path}: process {holder} {what}: one process at a time")
        if holder and not told:
            print(f"waiting: process {holder} {what}", flush=True)
            told = True
        time.sleep(0.2 if told else 0.01)


CHECKPOINT = {  # what the files of a checkpoint hold, see checkpoint.py
    "model.pt": {"config", "weights"}, "optimizer.pt": {"dense", "values"}, "state.pt": {"step"}}


def load_file(path, mmap=False, hint="remove its folder to use an older checkpoint"):
    """A file of torch.save or a .safetensors: tensors and plain Python, nothing that runs. With
    mmap, a tensor is read from disk when it is first used."""
    import torch

    try:
        if path.suffix == ".safetensors":
            return need("safetensors.torch", f"{path}").load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        for key in CHECKPOINT.get(path.name, ()):
            found[key]  # raises where it is another file
        return found
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
        raise UserError(f"{path}: truncated, damaged or no file of tensors "
                        f"({type(error).__name__}; nothing in it was run): {hint}") from None


def read_json(path):
    """The dict in a JSON file of ours; UserError if it is damaged."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not readable (no JSON object)")
    return content


def write_text(path, text):
    """Write a file that is whole or absent (see atomic)."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def discard(path):
    """Remove a file or a folder, if there is one; a folder loses its name before its content."""
    path = Path(path)
    if not first_rank():
        return
    if path.is_dir():
        hidden = path.with_name(f".tmp_{path.name.removeprefix('.tmp_')}")
        if hidden != path:
            discard(hidden)
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)
