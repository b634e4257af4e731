"""
Settings from a config file and the command line.
"""
import argparse
import ast
import dataclasses
import difflib
import runpy
import sys
import types
from pathlib import Path

from lib.common.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_OFF = ("auto", "on", "off")


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


def whole_number(text, least=1):
    """argparse type: a whole number, at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
    return int(text)


def setting(default, comment, least=None, choices=None, may_change=False):
    """Declare a field of a settings dataclass; everything about it stands in this one line.

    comment: shown by --help. least: the lowest value. choices: the only values. may_change: whether
    a run may be resumed with another value.
    """
    about = {"comment": comment, "least": least, "choices": choices, "may_change": may_change}
    return dataclasses.field(default=default, metadata=about)


def load_settings(defaults, argv):
    """Read settings from `[CONFIG.py] [--key=value ...]` on top of typed defaults.

    defaults: a dataclass whose fields are made by setting(); their types are bool, int, float, str
    or tuple (of ints). Prints and returns an instance. UserError for an unknown key, for a value of
    another type (an int is fine where a float is expected), below the least or not among the
    choices.
    """
    fields = {field.name: field for field in dataclasses.fields(defaults)}
    parser = Parser(description=sys.modules[defaults.__module__].__doc__,
                    usage="%(prog)s [CONFIG.py] [--setting=VALUE ...]")
    parser.add_argument("config", nargs="?", metavar="CONFIG.py")
    for key, field in fields.items():
        comment = f"({field.default}) {field.metadata['comment']}"
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
    values = _read(path, fields) if path else {}
    values |= {key: _checked("command line", fields, key, _parse(fields[key].default, text))
               for key, text in overrides.items()}
    config = defaults(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _read(path, fields):
    """Run a config file. Returns {key: value} of its settings."""
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
    return {key: _checked(path, fields, key, value) for key, value in names.items()
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


def _checked(where, fields, key, value):
    """The value of a setting in its type, or a UserError."""
    if key not in fields:
        raise unknown_key(where, fields, key)
    value = _typed(where, key, type(fields[key].default), value)
    least, choices = fields[key].metadata["least"], fields[key].metadata["choices"]
    if least is not None and not least <= value < 2**63:  # nan is in no range
        raise UserError(f"{where}: {key} = {value}: expected at least {least}")
    if choices is not None and value not in choices:
        raise UserError(f"{where}: {key} = {value!r}: expected one of "
                        f"{', '.join(choices)}")
    return value


def _typed(where, key, expected, value):
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
