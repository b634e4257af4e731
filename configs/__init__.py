"""
What every script starts with: its settings, the device it runs on, and how it ends.

A config is a short Python file of assignments; `--key=value` overrides it:
$ python pretrain.py configs/demo.py --max_steps=100 --memory_layers=2,3
"""
import argparse
import ast
import contextlib
import ctypes
import dataclasses
import difflib
import importlib
import os
import runpy
import shutil
import signal
import sys
import types
from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can mend: one line on stderr, exit status 2, nothing written."""


class Failure(RuntimeError):
    """Something that went wrong while working: one line on stderr, exit status 1."""


class Parser(argparse.ArgumentParser):
    """Of the tools' command lines: a mistake is a UserError, one line."""

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")


def whole(text, least=1):
    """The type of a command-line argument that is a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
    return int(text)


def run(main):
    """Call main() and end the process with its exit status: 0, or 2 for a UserError, 1 for a
    Failure or an error of the operating system (no space left, say), 130 for Ctrl-C."""
    try:
        sys.exit(main())
    except (UserError, Failure, OSError, KeyboardInterrupt) as error:
        print(f"error: {error}" if str(error) else "interrupted", file=sys.stderr)
        sys.exit({UserError: 2, KeyboardInterrupt: 130}.get(type(error), 1))


def need(module, what):
    """Import a package that only `what` needs; UserError that says so where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{what} needs a package: pip install {module.split('.')[0]}") from None


def load(defaults, argv):
    """Settings from `[CONFIG.py] [--key=value ...]` on top of typed defaults.

    defaults: a dataclass whose every field has a default of the type that it wants (bool, int,
    float, str, or a tuple of ints). Prints and returns an instance of it. An int is fine where a
    float is expected; anything else of another type, or an unknown key, is a UserError. With
    --help it prints the script's docstring and the defaults, and exits.
    """
    known = {field.name: field.default for field in dataclasses.fields(defaults)}
    if {"-h", "--help"} & set(argv):
        print(sys.modules["__main__"].__doc__)
        print("\n".join(f"--{key}={value}" for key, value in known.items()))
        sys.exit(0)
    values = {}
    if argv and not argv[0].startswith("--"):
        values, argv = _read(argv[0], known), argv[1:]
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if not (arg.startswith("--") and equals):
            hint = f"--{key}=VALUE" if key in known else "one config file, then --key=value"
            raise UserError(f"{arg}: expected {hint}")
        values[key] = _typed("command line", known, key, _parse(known, key, text))
    config = defaults(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _read(path, known):
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, map(str, Path("configs").glob("[!_]*.py")), n=1)
        raise UserError(f"{path}: no such config file" + (f" (did you mean {near[0]}?)"
                                                          if near else ""))
    try:
        names = runpy.run_path(path)
    except Exception as error:  # noqa: BLE001 - a user's file may raise anything
        line = getattr(error, "lineno", None)
        trace = error.__traceback__
        while trace:  # the innermost line that is the config's own
            if trace.tb_frame.f_code.co_filename == path:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"{path}:{line}" if line else path
        raise UserError(f"{where}: {type(error).__name__}: {error}") from None
    return {key: _typed(path, known, key, value) for key, value in names.items()
            if not key.startswith("_") and not isinstance(value, types.ModuleType)}


def _parse(known, key, text):
    if isinstance(known.get(key), str):
        return text
    try:
        return ast.literal_eval(text) if text else ()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text  # _typed says what was expected


def _typed(where, known, key, value):
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else " (--help lists the keys)"
        raise UserError(f"{where}: unknown key '{key}'{hint}")
    want = type(known[key])
    if want is tuple:
        value = (value,) if type(value) is int else tuple(value) if type(value) is list else value
        if type(value) is tuple and all(type(x) is int for x in value):
            return value
    elif want is float and type(value) is int:
        return float(value)
    elif type(value) is want:
        return value
    name = "tuple of ints" if want is tuple else want.__name__
    raise UserError(f"{where}: {key} = {value!r}: expected {name}, found {type(value).__name__}")


def at_least(config, lowest):
    """UserError for a setting that is below its least value; lowest: {key: value}."""
    for key, least in lowest.items():
        if not least <= getattr(config, key) < 2**63:  # nan is in no range
            raise UserError(f"{key} = {getattr(config, key)}: expected at least {least}")


def setup(device="auto", dtype="auto", seed=0):
    """Choose the device and the dtype of the matrix products, say why, seed torch.

    device: 'auto' (cuda, else mps, else cpu) or a torch device; dtype: 'auto', 'float32',
    'bfloat16' or 'float16'. Returns (torch.device, torch.dtype); anything but float32 is meant
    for torch.autocast, with a GradScaler for float16.
    """
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = ("cuda" if cuda else "mps" if mps else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(name)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # unknown, absent, or without memory ('meta')
        raise UserError(f"device = {name!r}: {str(error).splitlines()[0]}") from None
    dtypes = ("float32", "bfloat16", "float16")
    if dtype not in ("auto", *dtypes):
        raise UserError(f"dtype = {dtype!r}: expected auto, {', '.join(dtypes)}")
    reason = "as asked"
    if dtype == "auto":
        if chosen.type != "cuda":
            dtype, reason = "float32", f"mixed precision is for CUDA, this is {chosen.type}"
        elif torch.cuda.get_device_capability(chosen) >= (8, 0):
            dtype, reason = "bfloat16", "the card computes in it: float32's range, no scaler"
        else:
            dtype, reason = "float16", "the card has no bfloat16: gradients are scaled"
    if dtype == "float16" and chosen.type != "cuda":
        raise UserError("dtype = 'float16' needs CUDA: take bfloat16 or float32")
    torch.manual_seed(seed)
    card = f" ({torch.cuda.get_device_name(chosen)})" if chosen.type == "cuda" else ""
    print(f"device {chosen}{card}, torch {torch.__version__}, dtype {dtype}: {reason}")
    return chosen, getattr(torch, dtype)


def catch_signals():
    """From now on SIGINT and SIGTERM are put into the returned list, for the loop to see; a second
    one ends the process at once."""
    def on_signal(number, frame):
        os.write(1, b"\nfinishing the step, then saving; once more quits at once, unsaved\n")
        signal.signal(number, signal.SIG_DFL)
        signals.append(number)

    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return signals


def keep_freed_memory(device):
    """Let a process that works on a CPU keep the memory that it frees, for the next step. By
    default glibc gives large blocks back to Linux, which then has to clear every page anew."""
    linux = device.type == "cpu" and sys.platform == "linux"
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if linux else None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def atomic(path):
    """Give a temporary path beside `path` to write a file or a folder to; at the end what was
    written is flushed to disk and renamed to `path`, or removed if writing failed. So `path` is
    whole or absent, whenever the process is killed. An existing file is replaced, an existing
    folder is an error."""
    path = Path(path)
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


def discard(path):
    """Remove a file or a folder, if there is one; a folder loses its name before its content."""
    path = Path(path)
    if path.is_dir():
        hidden = path.with_name(f".tmp_{path.name.removeprefix('.tmp_')}")
        if hidden != path:
            discard(hidden)
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)
