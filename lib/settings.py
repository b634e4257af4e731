"""
Read settings from a config file and the command line.
"""
import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import runpy
import sys
import types
from pathlib import Path

from lib.errors import UserError


class Parser(argparse.ArgumentParser):
    """Parse a command line as argparse does. Mistakes are UserErrors, and help keeps its lines."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **settings)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")


def load_settings(Config, argv):
    """Read the arguments `[CONFIG.py] [--key=value ...]`. Prints and returns an instance of Config.

    Config is a dataclass. A setting has the type of its default: bool, int, float, str or tuple
    (of ints). UserError for an unknown key and for a value of another type.
    """
    if "--help" in argv or "-h" in argv:
        print(sys.modules[Config.__module__].__doc__)
        print(inspect.getsource(Config))
        sys.exit(0)
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {}
    for path in argv:
        if not path.startswith("--"):
            if not Path(path).is_file():
                near = difflib.get_close_matches(path, map(str, Path("configs").glob("*.py")), n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise UserError(f"{path}: no such config file{hint}")
            for key, value in runpy.run_path(path).items():
                if not key.startswith("_") and not isinstance(value, types.ModuleType):
                    values[key] = as_typed(path, key, value, defaults)
    for arg in argv:
        if arg.startswith("--"):
            key, _, text = arg.removeprefix("--").partition("=")
            values[key] = as_typed("command line", key, text, defaults)
    config = Config(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
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


def check_choice(name, value, choices):
    """Raise UserError if a setting's value is not one of its choices."""
    if value not in choices:
        raise UserError(f"{name} = {value!r}: expected one of {', '.join(choices)}")
