"""
Talk with a person: read settings, show progress, and end a script after a mistake.
"""
import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import runpy
import subprocess
import sys
import traceback
import types
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]  # where the scripts are
sys.set_int_max_str_digits(0)  # so that a message can show any number


class UserError(ValueError):
    """The user's mistake: one line on stderr, exit status 2, nothing written."""


class Failure(RuntimeError):
    """A failure at work: one line on stderr, exit status 1."""


class Parser(argparse.ArgumentParser):
    """Parse a command line as argparse does. Mistakes are UserErrors, and help keeps its lines."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **settings)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")


class Progress(tqdm):
    """Show a bar on the first rank. Away from a terminal it is drawn every 10 seconds."""

    def __init__(self, *args, **settings):
        pause = 0.1 if sys.stderr.isatty() else 10
        other_rank = os.environ.get("RANK", "0") != "0"
        super().__init__(*args, mininterval=pause, delay=pause, disable=other_rank, **settings)


def at_least(lowest, kind=int):
    """Make a `type` for an option of Parser: a number that is at least `lowest`."""
    def number(text):
        value = kind(text)
        if not lowest <= value < 2**31:  # nan is neither
            raise argparse.ArgumentTypeError(f"{text}: expected {lowest} or more, below 2**31")
        return value
    return number


def from_zero(default):
    """Give a setting its default. It is a number that may be 0."""
    return dataclasses.field(default=default, metadata={"may_be_zero": True})


def share(default):
    """Give a setting its default. It is a number from 0 to 1."""
    return dataclasses.field(default=default, metadata={"may_be_zero": True, "highest": 1})


def load_settings(Settings, argv):
    """Read the arguments `[CONFIG.py] [--key=value ...]`. Returns an instance of Settings.

    "--key value" works, too. Prints the settings that are not the defaults. Settings is a
    dataclass. A setting has the type of its default: bool, int, float, str or tuple (of ints).
    Whole numbers are at least 1 and real ones above 0, but for those of from_zero() and share().
    The attribute `given` has the names of those given. UserError for an unknown key, another type
    and a number out of range.
    """
    if "--help" in argv or "-h" in argv:
        print(sys.modules[Settings.__module__].__doc__)
        print(inspect.getsource(Settings))
        sys.exit(0)
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    from_files, given = {}, {}
    arguments = iter(argv)
    for arg in arguments:
        if arg.startswith("--"):
            key, equals, text = arg.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            text = text if equals else next(arguments, "--")
            if text.startswith("--"):
                raise UserError(f"{arg} has no value: --{key}=VALUE")
            given[key] = as_typed("command line", key, text, defaults)
            continue
        if not arg.endswith(".py") or not Path(arg).is_file():
            raise UserError(f"{arg}: no such config file, a .py")
        for key, value in run_config(arg).items():
            if not key.startswith("_") and not isinstance(value, types.ModuleType):
                from_files[key] = as_typed(arg, key, value, defaults)
    settings = Settings(**from_files | given)
    settings.given = {*from_files, *given}
    for field in dataclasses.fields(settings):
        check_number(field.name, getattr(settings, field.name), **field.metadata)
    changed = [f"{key}={value}" for key, value in dataclasses.asdict(settings).items()
               if value != defaults[key]]
    print("settings:", ", ".join(changed) or "the defaults")
    return settings


def run_config(path):
    """Run a config file. Returns its variables by name. UserError for whatever fails in it."""
    try:
        return runpy.run_path(path)
    except SyntaxError as error:
        raise UserError(f"{path}: {error}, column {error.offset}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a person's code raises anything
        *_, last = traceback.extract_tb(error.__traceback__)
        raise UserError(f"{last.filename}:{last.lineno}: {error!r}") from None


def utf8(text):
    """Return a text. UserError if it is not UTF-8, or has a NUL, which no file's name can have."""
    if re.search("[\0\ud800-\udfff]", text):
        raise UserError(f"{text!r}: expected UTF-8 text without NUL")
    return text


def as_typed(where, key, value, defaults):
    """Return a setting's value in the type of its default. "4,8", 4 and [4, 8] stand for tuples."""
    if key not in defaults:
        like = difflib.get_close_matches(key, defaults, n=1)
        hint = f"did you mean {like[0]}?" if like else "--help lists the keys"
        raise UserError(f"{where}: unknown key '{key}' ({hint})")
    kind, typed = type(defaults[key]), value
    with contextlib.suppress(Exception):  # other text, and a number beyond all floats, stay
        if isinstance(value, str) and kind is not str:
            typed = ast.literal_eval(value or "()")
        if kind is float and type(typed) is int:
            typed = float(typed)
        if kind is tuple:
            typed = (typed,) if type(typed) is int else tuple(typed)
    if type(typed) is not kind or kind is tuple and {*map(type, typed)} - {int}:
        expected = "whole numbers" if kind is tuple else kind.__name__
        raise UserError(f"{where}: {key} = {value!r}: expected {expected}")
    return utf8(typed) if kind is str else typed


def check_number(name, value, may_be_zero=False, highest=2**63 - 1):
    """Raise UserError for a number out of range. value: a number, a tuple of them, or no number."""
    for number in value if isinstance(value, tuple) else [value]:
        if isinstance(number, bool | str):
            continue
        if not 0 <= number <= highest or number == 0 and not may_be_zero:
            expected = "0 or more" if may_be_zero else "more than 0"
            if highest == 1:
                expected = "from 0 to 1"
            raise UserError(f"{name} = {number}: expected {expected}")


def check_choice(name, value, choices):
    """Raise UserError if a setting's value is not one of its choices."""
    if value not in choices:
        raise UserError(f"{name} = {value!r}: expected one of {', '.join(choices)}")


def run_main(main):
    """Call main() and end the process with its exit status.

    A UserError is one line on stderr and status 2. A Failure, a lack of memory and what the
    operating system refuses are one line and status 1. Ctrl-C is status 130. If nobody reads
    stdout any more, the status is 141. Other errors keep their traceback.
    """
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        utf8(" ".join(sys.argv[1:]))
        sys.exit(main())
    except UserError as error:
        status, line = 2, f"error: {error}"
    except Failure as error:
        status, line = 1, f"error: {error}"
    except KeyboardInterrupt:
        status, line = 130, "interrupted"
    except BrokenPipeError:
        os._exit(141)  # else Python would flush stdout once more
    except Exception as error:
        refusal = find_refusal(error)
        text = str(refusal or error)
        no_memory = "out of memory|llocate (memory|[0-9])|Storage size calculation overflowed"
        status, line = 1, f"error: {text}"
        if isinstance(error, MemoryError) or re.search(no_memory, text):
            line = (f"error: {text.partition(chr(10))[0] or 'out of memory'}: take a smaller "
                    "batch_size (and more accumulation), fewer tokens or a smaller model")
        elif not refusal:
            raise
    print(line.replace("\n", " ")[:2000], file=sys.stderr)
    sys.exit(status)


def find_refusal(error):
    """Find what the operating system refused: an OSError, or None.

    torch raises a RuntimeError over it while a file is closed.
    """
    while isinstance(error, RuntimeError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) and error.errno else None


def run_script(script, *args):
    """Run another script of this folder as a person would."""
    command = [sys.executable, ROOT / script, *args]
    print(f"$ python {script} {' '.join(args)}", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise Failure(f"python {script} {' '.join(args)} failed")
