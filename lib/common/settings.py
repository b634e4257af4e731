"""
Read settings from a config file and the command line.
"""
import argparse
import ast
import dataclasses
import difflib
import runpy
import sys
import traceback
import types
from pathlib import Path

from lib.common.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_OFF = ("auto", "on", "off")


class Parser(argparse.ArgumentParser):
    """Parse a command line: argparse, but with UserErrors and with docstrings as they are."""

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


def setting(default, comment, least=None, choices=None, may_change=False):
    """Declare a field of a settings dataclass, in one line. The `comment` is shown by --help.
    `least` is the lowest value, `choices` are the only values. With `may_change` a run can be
    resumed with another value."""
    about = {"comment": comment, "least": least, "choices": choices, "may_change": may_change}
    return dataclasses.field(default=default, metadata=about)


def load_settings(defaults, argv):
    """Read settings from the arguments `[CONFIG.py] [--key=value ...]`. `defaults` is a dataclass
    whose fields are made by setting(): bool, int, float, str or tuple (of ints). Prints and returns
    an instance. UserError for an unknown key, and for a value of another type or out of range. An
    int is fine if a float is expected."""
    fields = {field.name: field for field in dataclasses.fields(defaults)}
    parser = Parser(description=sys.modules[defaults.__module__].__doc__,
                    usage="%(prog)s [CONFIG.py] [--setting=VALUE ...]")
    parser.add_argument("config", nargs="?", metavar="CONFIG.py")
    for key, field in fields.items():
        choices = field.metadata["choices"]
        comment = f"({field.default}) {field.metadata['comment']}"
        comment += f": {', '.join(choices)}" if choices else ""
        parser.add_argument(f"--{key}", metavar="VALUE", default=argparse.SUPPRESS,
                            help=comment.replace("%", "%%"))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        key = unknown[0].removeprefix("--").partition("=")[0]
        if unknown[0].startswith("--") and key not in fields:
            raise unknown_key("command line", fields, key)
        hint = f"--{key}=VALUE" if key in fields else "one config file, then --key=value"
        raise UserError(f"{unknown[0]}: expected {hint}")
    overrides = vars(args)
    path = overrides.pop("config")
    values = _read_config(path, fields) if path else {}
    values |= {key: _checked("command line", fields, key, _parse_value(fields[key].default, text))
               for key, text in overrides.items()}
    config = defaults(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _read_config(path, fields):
    """Run a config file. Returns {key: value} for its settings."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, map(str, Path("configs").glob("*.py")), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # a SyntaxError knows its own
        where = f"{path}:{line}" if line else path
        raise UserError(f"{where}: {type(error).__name__}: {error}") from None
    return {key: _checked(path, fields, key, value) for key, value in names.items()
            if not key.startswith("_") and not isinstance(value, types.ModuleType)}


def _parse_value(default, text):
    """Return the Python value of a text; the text itself for a str."""
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval(text) if text else ()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text  # _typed says what was expected


def unknown_key(where, known, key):
    """Return the UserError for a key that is not among the known ones."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else " (--help lists the keys)"
    return UserError(f"{where}: unknown key '{key}'{hint}")


def _checked(where, fields, key, value):
    """Return a setting's value in its type; UserError if it is a wrong one."""
    if key not in fields:
        raise unknown_key(where, fields, key)
    value = _typed(where, key, type(fields[key].default), value)
    least, choices = fields[key].metadata["least"], fields[key].metadata["choices"]
    if least is not None and not least <= value < 2**63:  # nan is in no range
        raise UserError(f"{where}: {key} = {value}: expected at least {least}")
    if choices is not None and value not in choices:
        raise UserError(f"{where}: {key} = {value!r}: expected one of {', '.join(choices)}")
    return value


def _typed(where, key, expected, value):
    """Return a value as the expected type; UserError if it has another one."""
    if expected is tuple:
        value = (value,) if type(value) is int else tuple(value) if type(value) is list else value
        if type(value) is tuple and all(type(x) is int for x in value):
            return value
    elif expected is float and type(value) is int:
        return float(value)
    elif type(value) is expected:
        return value
    name = "tuple of ints" if expected is tuple else expected.__name__
    raise UserError(f"{where}: {key} = {value!r}: expected {name}, found {type(value).__name__}")
