"""
Read settings from a config file and the command line, and end a script after a mistake.
"""
import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]  # where the scripts are


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
        hint = "options have _, not -; " if re.search(r"--\w+-\w", message) else ""
        raise UserError(f"{message} ({hint}{self.prog} --help)")

    def parse_known_args(self, *args):
        parsed, rest = super().parse_known_args(*args)
        check_numbers(vars(parsed), may_be_zero=("seed", "temperature"))
        return parsed, rest


def load_settings(Config, argv):
    """Read the arguments `[CONFIG.py] [--key=value ...]`. Returns an instance of Config.

    "--key value" works, too. Prints the settings that are not the defaults. Config is a dataclass.
    A setting has the type of its default: bool, int, float, str or tuple (of ints).
    Config.MAY_BE_ZERO and AT_MOST_ONE say which numbers may be 0 and not above 1. UserError for an
    unknown key, another type and a number out of range.
    """
    if "--help" in argv or "-h" in argv:
        print(sys.modules[Config.__module__].__doc__)
        print(inspect.getsource(Config))
        sys.exit(0)
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
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
            near = difflib.get_close_matches(arg, map(str, Path("configs").glob("*.py")), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{arg}: no such config file, a .py{hint}")
        for key, value in runpy.run_path(arg).items():
            if not key.startswith("_") and not isinstance(value, types.ModuleType):
                from_files[key] = as_typed(arg, key, value, defaults)
    config = Config(**from_files | given)
    check_numbers(dataclasses.asdict(config), Config.MAY_BE_ZERO, Config.AT_MOST_ONE)
    changed = [f"{key}={value}" for key, value in dataclasses.asdict(config).items()
               if value != defaults[key]]
    print("settings:", ", ".join(changed) or "the defaults")
    return config


def as_typed(where, key, value, defaults):
    """Return a setting's value in the type of its default. "4,8", 4 and [4, 8] stand for tuples."""
    if key not in defaults:
        near = difflib.get_close_matches(key, defaults, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the keys"
        raise UserError(f"{where}: unknown key '{key}' ({hint})")
    kind, typed = type(defaults[key]), value
    if isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError):
            typed = ast.literal_eval(value or "()")
    if kind is float and type(typed) is int:
        typed = float(typed)
    if kind is tuple and type(typed) is int:
        typed = (typed,)
    if kind is tuple and type(typed) is list:
        typed = tuple(typed)
    if type(typed) is not kind:
        raise UserError(f"{where}: {key} = {value!r}: expected {kind.__name__}")
    return typed


def check_numbers(values, may_be_zero, at_most_one=()):
    """Raise UserError for a number out of range.

    values: {name: number, list of numbers or anything else}. No number is negative. Whole ones are
    at least 1 and real ones above 0, unless `may_be_zero` names them. `at_most_one` names numbers
    that are not above 1.
    """
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            expected = "0 or more" if name in may_be_zero else "more than 0"
            highest = 2**63 - 1
            if name in at_most_one:
                expected, highest = "at most 1", 1
            if not 0 <= number <= highest or number == 0 and name not in may_be_zero:
                raise UserError(f"{name} = {number}: expected {expected}")


def check_choice(name, value, choices):
    """Raise UserError if a setting's value is not one of its choices."""
    if value not in choices:
        raise UserError(f"{name} = {value!r}: expected one of {', '.join(choices)}")


def run_main(main):
    """Call main() and end the process with its exit status.

    A UserError is one line on stderr and status 2. A Failure, a full disk and a lack of memory are
    one line and status 1. Ctrl-C is status 130. Other errors keep their traceback.
    """
    try:
        sys.exit(main())
    except UserError as error:
        status, line = 2, f"error: {error}"
    except Failure as error:
        status, line = 1, f"error: {error}"
    except KeyboardInterrupt:
        status, line = 130, "interrupted"
    except (OSError, RuntimeError, MemoryError) as error:
        text = str(error) or "out of memory"  # Python's own error has no text
        status, line = 1, f"error: {text.splitlines()[0]}"
        if "out of memory" in text or "can't allocate memory" in text:
            line += (" Take a smaller batch_size (and more accumulation), fewer tokens or a "
                     "smaller model")
        elif "No space left" not in text:
            raise
    print(line, file=sys.stderr)
    sys.exit(status)


def run_script(script, *args):
    """Run another script of this folder as a person would."""
    command = [sys.executable, ROOT / script, *args]
    print(f"$ python {script} {' '.join(args)}", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise Failure(f"python {script} {' '.join(args)} failed")
