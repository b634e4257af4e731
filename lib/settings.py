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
import traceback
import types
from pathlib import Path

from lib.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_OFF = ("auto", "on", "off")
OTHER_NAMES = {"learning_rate": "lr", "hidden_size": "d_model"}  # what other projects call them


class Parser(argparse.ArgumentParser):
    """Parse a command line as argparse does. Mistakes are UserErrors, and help keeps its lines."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **settings)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")

    def commands(self, *functions):
        """Make each function a command of the same name; args.call is the function then. Returns
        option("NAME NAME", ...), which is add_argument(...) for all the named commands."""
        subparsers, parsers = self.add_subparsers(required=True, metavar="COMMAND"), {}
        for function in functions:
            name, summary = function.__name__, function.__doc__.split("\n")[0]
            parsers[name] = subparsers.add_parser(name, help=summary)
            parsers[name].set_defaults(command=name, call=function)

        def option(names, *flags, **settings):
            for name in names.split():
                parsers[name].add_argument(*flags, **settings)
        return option


def whole_number(text, least=1):
    """Return the whole number in a text; for argparse's `type`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
    return int(text)


def existing_path(text):
    """Return the path of a file or folder on disk; for argparse's `type`."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return Path(text)


def load_settings(Config, argv):
    """Read the arguments `[CONFIG.py] [--key=value ...]`. Prints and returns an instance of Config.

    Config is a dataclass. A setting has the type of its default: bool, int, float, str or tuple
    (of ints). UserError for an unknown key and for a value of another type.
    """
    if "--help" in argv or "-h" in argv:
        print(sys.modules[Config.__module__].__doc__)
        print(inspect.getsource(Config))
        sys.exit(0)
    given = {}
    paths = [arg for arg in argv if not arg.startswith("--")]
    for path in paths[:1]:
        given = {key: (path, value) for key, value in _run_config(path).items()}
    for arg in paths[1:]:
        raise UserError(f"{arg}: expected one config, and settings as --key=value")
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if arg.startswith("--"):
            given[key] = ("command line", text if equals else None)

    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {}
    for key, (where, value) in given.items():
        if key not in defaults:
            raise UserError(f"{where}: unknown key '{key}' ({_hint(key, defaults)})")
        if value is None:
            raise UserError(f"{where}: --{key}: expected --{key}=VALUE")
        kind = type(defaults[key])
        values[key] = _convert(value, kind)
        if type(values[key]) is not kind:
            raise UserError(f"{where}: {key} = {value!r}: expected {kind.__name__}")
    config = Config(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _run_config(path):
    """Run a config file. Returns its names and values."""
    if not Path(path).is_file():
        known = {file.stem: file for file in Path("configs").glob("*.py")}
        near = difflib.get_close_matches(Path(path).stem, known, n=1)
        hint = f" (did you mean {known[near[0]]}?)" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    try:
        names = runpy.run_path(path)
    except Exception as error:  # noqa: BLE001 - a person's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", 1)  # a SyntaxError knows its own
        raise UserError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    return {key: value for key, value in names.items()
            if not key.startswith("_") and not isinstance(value, types.ModuleType)}


def _hint(key, known):
    """Suggest the known key that may be meant."""
    names = {name: name for name in known} | OTHER_NAMES
    near = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {names[near[0]]}?" if near else "--help lists the keys"


def _convert(value, kind):
    """Return a value as a type, if it stands for one: 1 is a float, "4,8" and 4 are tuples."""
    if isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value or "()")
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and type(value) is int:
        return (value,)
    return tuple(value) if kind is tuple and type(value) is list else value
