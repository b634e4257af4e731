"""
Write files that are whole or absent, lock folders, read damaged files without harm.
"""
import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

from lib.errors import UserError, need

CHECKPOINT = {  # {file of a checkpoint: keys that it must have}, see lib/weights/checkpoint.py
    "model.pt": {"config", "weights"}, "optimizer.pt": {"dense", "values"}, "state.pt": {"step"}}


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
        yield temporary
        for file in filter(Path.is_file, [temporary, *temporary.rglob("*")]):
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        discard(temporary)


@contextlib.contextmanager
def lock(path, work, wait=False):
    """Let one process at a time work in a folder, which need not exist yet.

    `work` is what the process does: "trains there". A second process gets a UserError that names
    the first and its work, or waits for it if `wait`. The lock is flock's, on a file beside the
    folder. It ends with its process, even after a kill. Under torchrun the first rank takes it.
    A folder may be a link to another one. UserError for a path that can be no folder.
    """
    if not first_rank():
        yield
        return
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path}: a link to {os.readlink(path)}, which is not there")
    path = Path(os.path.realpath(path))
    if not path.name or path.exists() and not path.is_dir():
        raise UserError(f"{path}: expected the path of a folder, a new one or an earlier run's")
    file = path.with_name(f".lock_{path.name}")
    new_folders = [folder for folder in path.parents if not folder.exists()]
    while True:
        with contextlib.suppress(FileExistsError):
            file.parent.mkdir(parents=True)
        if file.is_symlink():
            raise UserError(f"{file}: a link in place of a lock file: remove it")
        with contextlib.suppress(FileNotFoundError):  # the last holder removes file and folder
            handle = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            _lock_file(handle, path, work, wait)
            if os.path.samestat(os.fstat(handle.fileno()), file.stat()):
                break
    try:
        file.write_text(str(os.getpid()))
        yield
    finally:
        file.unlink(missing_ok=True)
        handle.close()
        with contextlib.suppress(OSError):  # not empty
            for folder in new_folders:
                folder.rmdir()


def _lock_file(handle, path, work, wait):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = f"process {handle.read()} {work}"
        if not wait:
            raise UserError(f"{path}: {holder}: one process at a time") from None
        print(f"waiting: {holder}", flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        print(f"warning: {path.parent}: no locks on this file system ({error.strerror}): "
              f"start no second process for {path.name}")


def load_file(path, mmap=False, hint="remove its folder to use an older checkpoint"):
    """Load a file of torch.save or a .safetensors, without running code in it. With mmap, a tensor
    is read from disk when it is first used. UserError with `hint` if the file is damaged."""
    import torch

    try:
        if path.suffix == ".safetensors":
            return need("safetensors.torch", f"{path}").load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        for key in CHECKPOINT.get(path.name, ()):
            content[key]  # raises if this is another file
        return content
    except UserError:
        raise
    except UnicodeEncodeError:
        raise UserError(f"{path}: torch reads no path that is not UTF-8: rename it") from None
    except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
        raise UserError(f"{path}: truncated, damaged or no file of tensors "
                        f"({type(error).__name__}; nothing in it was run): {hint}") from None


def to_json(content, indent=None):
    """Format as JSON. It knows only finite numbers, so nan and infinity become null."""
    def finite(value):
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(finite(content), indent=indent)


def null_to_nan(content):
    """Turn the null values of a JSON object into nan; for json's `object_hook`."""
    return {key: math.nan if value is None else value for key, value in content.items()}


def read_json(path, object_hook=None):
    """Read a JSON file that holds an object; UserError if it is damaged."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=object_hook)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not readable (no JSON object)")
    return content


def write_text(path, text):
    """Write a text file that is whole or absent (see atomic)."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_new_folder(path):
    """Raise a UserError if `path` exists, or if no folder can be made there."""
    parent = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if Path(path).exists():
        raise UserError(f"{path} exists already: name a new folder")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{path}: no folder can be made in {parent}")


def discard(path):
    """Remove a file, a link or a folder, if it is there. A folder is renamed before its content
    is deleted, so none is ever half there."""
    path = Path(path)
    if not first_rank():
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    hidden = path.with_name(f".tmp_{path.name.removeprefix('.tmp_')}")
    if hidden != path:
        discard(hidden)
    shutil.rmtree(path.rename(hidden))


def under_torchrun():
    """Tell whether this is one of torchrun's processes (see lib/distributed/processes.py)."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def first_rank():
    """Tell whether this process prints and writes files: it is torchrun's first, or alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"
