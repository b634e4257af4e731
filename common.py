"""
What every script starts with: errors, settings, the device, progress, files that are never half
written.

A config is a short Python file of assignments; a setting on the command line overrides it:
$ python pretrain.py configs/demo.py --max_steps=100 --memory_layers 2,3
"""
import argparse
import ast
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import fcntl
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

from tqdm import tqdm

# OpenMP's threads spin while they wait, and so take the cores from whatever else runs. Spinning less
# costs little: tokens/s of configs/demo.py on two cores of a Zen 4 EPYC, quiet and beside one busy
# process, were 61,900 and 13,700 by default, 59,500 and 22,200 with this. OMP_NUM_THREADS=1, with
# 35,500 and 37,800, is for machines that are always busy (results/speed.md). The variables are read
# when torch is loaded, so a script imports this file before torch.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
if sys.platform == "linux" and not any(name in os.environ for name in WAITING):
    os.environ["GOMP_SPINCOUNT"] = "2000"


class UserError(ValueError):
    """The user's mistake: one line on stderr, exit status 2, nothing written."""


class Failure(RuntimeError):
    """Something failed while working: one line on stderr, exit status 1."""


def under_torchrun():
    """Whether this is one of the processes of torchrun, see ranks.py."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def first_rank():
    """Whether this process is the first of torchrun's, which prints and writes, or alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UserError and shows the docstring as it is written."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **settings)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")

    def commands(self, *functions):
        """Make every function a command of the same name, args.call. Returns option("NAME NAME",
        ...), which is add_argument(...) for all the commands named."""
        subparsers, parsers = self.add_subparsers(required=True, metavar="COMMAND"), {}
        for function in functions:
            name, summary = function.__name__, function.__doc__.split("\n")[0]
            parsers[name] = subparsers.add_parser(name, help=summary)
            parsers[name].set_defaults(command=name, call=function)

        def option(names, *flags, **settings):
            for name in names.split():
                parsers[name].add_argument(*flags, **settings)
        return option


def whole(text, least=1):
    """argparse type: a whole number, at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
    return int(text)


def run(main):
    """Call main() and end the process with its exit status: 0, or 2 for a UserError, 1 for a
    Failure or an error of the operating system (no space left, say), 130 for Ctrl-C."""
    try:
        try:
            status = main()
        finally:
            flush_stdout()
        sys.exit(status)
    except BrokenPipeError:  # `| head` has seen enough
        sys.exit(141)
    except (UserError, Failure, OSError, KeyboardInterrupt) as error:
        print(f"error: {error}" if str(error) else "interrupted", file=sys.stderr)
        sys.exit({UserError: 2, KeyboardInterrupt: 130}.get(type(error), 1))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"error: {str(error).splitlines()[0]} Take a smaller batch_size (in pretraining with "
              "as much more accumulation the step stays the same), fewer tokens or a smaller model",
              file=sys.stderr)
        sys.exit(1)


def flush_stdout():
    """Write what was printed. Python would only do it at its very end, where a closed pipe or a
    full disk can no longer be caught; after an error here it has nothing left to write."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def out_of_memory(error):
    """Whether torch's RuntimeError says so; on a CPU it has no type of its own."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def need(module, what):
    """Import an optional package; UserError that names it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{what} needs a package: pip install {module.split('.')[0]}") from None


PRETRAINED = {  # weights that prepare_data.py fetches from the hub, all Apache-2.0
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased"}


def unknown_weights(name):
    """The UserError for weights that are neither on disk nor known."""
    if "roberta" in name.lower():
        return UserError(f"{name}: RoBERTa's weights have ids of their own for GPT-2's tokens, and "
                         "are not read here: train from scratch on a corpus of --tokenizer gpt2")
    recipe = Path(__file__).with_name("configs") / f"{Path(name).name}.py"
    makes = f"python pretrain.py configs/{recipe.name} makes them, " if recipe.is_file() else ""
    return UserError(f"{name}: no weights there: expected a run, a checkpoint or a folder in "
                     f"Hugging Face layout; {makes}python prepare_data.py weights NAME fetches "
                     f"{', '.join(PRETRAINED)} or ORG/NAME of the hub")


def run_script(script, *args):
    """Run another script of this folder, as a person would; Failure if it fails."""
    print(f"$ python {script} {' '.join(args)}", flush=True)
    path = Path(__file__).with_name(script)
    if subprocess.run([sys.executable, path, *args], check=False).returncode:
        raise Failure(f"python {script} {' '.join(args)} failed")


class Progress(tqdm):
    """A tqdm bar on a terminal; elsewhere a line every 10 seconds."""

    def __init__(self, *args, **settings):
        if not sys.stderr.isatty():
            settings |= {"mininterval": 10, "delay": 10, "leave": False, "ascii": True,
                         "ncols": 100}
        super().__init__(*args, disable=not first_rank(), **settings)

    @staticmethod
    def status_printer(file):
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: text and print(text, file=file, flush=True)


def load(defaults, argv):
    """Settings from `[CONFIG.py] [--key=value ...]` on top of typed defaults.

    defaults: a dataclass whose every field has a default of the type that it wants (bool, int,
    float, str, or a tuple of ints) and a comment for --help. Prints and returns an instance of it.
    An int is fine where a float is expected; anything else of another type, or an unknown key, is
    a UserError.
    """
    known = {field.name: field.default for field in dataclasses.fields(defaults)}
    comments = re.findall(r"^    (\w+): \w+ = [^#\n]+(?:  # (.*))?$", inspect.getsource(defaults),
                          re.MULTILINE)
    parser = Parser(description=sys.modules[defaults.__module__].__doc__,
                    usage="%(prog)s [CONFIG.py] [--setting=VALUE ...]")
    parser.add_argument("config", nargs="?", metavar="CONFIG.py")
    for key, comment in comments:
        parser.add_argument(f"--{key}", metavar="VALUE", default=argparse.SUPPRESS,
                            help=f"({known[key]}) {comment}".replace("%", "%%"))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        key = unknown[0].removeprefix("--").partition("=")[0]
        if unknown[0].startswith("--") and key not in known:
            raise unknown_key("command line", known, key)
        hint = f"--{key}=VALUE" if key in known else "one config file, then --key=value"
        raise UserError(f"{unknown[0]}: expected {hint}")
    overrides = vars(args)
    path = overrides.pop("config")
    values = _read(path, known) if path else {}
    values |= {key: _typed("command line", known, key, _parse(known[key], text))
               for key, text in overrides.items()}
    config = defaults(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _read(path, known):
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, map(str, Path("configs").glob("*.py")), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything
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


def _parse(default, text):
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval(text) if text else ()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text  # _typed says what was expected


def unknown_key(where, known, key):
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else " (--help lists the keys)"
    return UserError(f"{where}: unknown key '{key}'{hint}")


def _typed(where, known, key, value):
    if key not in known:
        raise unknown_key(where, known, key)
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
    """UserError for a setting below its least value; lowest: {key: value}."""
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

    if under_torchrun() and ":" in device:
        raise UserError(f"device = {device!r}: each rank has a card of its own: --device=cuda")
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
    one ends the process at once (not under torchrun: there a Ctrl-C reaches a rank twice)."""
    def on_signal(number, frame):
        signals.append(number)
        if under_torchrun():  # which passes on what a terminal has already sent to all
            return
        os.write(1, b"\nfinishing the step, then saving; once more quits at once, unsaved\n")
        for each in both:
            signal.signal(each, signal.SIG_DFL)

    signals, both = [], (signal.SIGINT, signal.SIGTERM)
    for each in both:
        signal.signal(each, on_signal)
    return signals


def keep_freed_memory(device):
    """Let a process that works on a CPU keep the memory that it frees for the next step. By
    default glibc gives large blocks back to Linux, which then has to clear every page anew."""
    linux = device.type == "cpu" and sys.platform == "linux"
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if linux else None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def markdown(header, rows, align=str.ljust):
    """A table in Markdown, columns aligned: one string. A float gets two decimals, None nothing."""
    def text(cell):
        cell = "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
        return cell.replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(align, row, widths))} |\n" for row in rows)


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
