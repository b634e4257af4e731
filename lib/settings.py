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

from lib.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_OFF = ("auto", "on", "off")
TYPES = {bool: "True|False", int: "INT", float: "FLOAT", str: "TEXT", tuple: "INT,INT"}


class Parser(argparse.ArgumentParser):
    """Parse a command line: argparse, but with UserErrors and with docstrings as they are."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **settings)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        try:
            "".join(args).encode()
        except UnicodeEncodeError:
            raise UserError(f"{' '.join(args)!a}: names and texts must be UTF-8") from None
        return super().parse_known_args(args, namespace)

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
    if not text.isdecimal() or not least <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
    return int(text)


def existing_path(text):
    """Return the path of a file or folder on disk; for argparse's `type`."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return Path(text)


def setting(default, comment, least=None, choices=None, may_change=False, group=None):
    """Declare a field of a settings dataclass. --help shows the `comment`. `least` is the lowest
    value, `choices` are the only ones. With `may_change` a run can go on with another value.
    `group` is a title in --help, for this setting and the next ones."""
    about = {"comment": comment, "least": least, "choices": choices, "may_change": may_change,
             "group": group}
    return dataclasses.field(default=default, metadata=about)


def load_settings(defaults, argv):
    """Read settings from the arguments `[CONFIG.py] [--key=value ...]`. Prints and returns an
    instance of `defaults`, a dataclass of setting() fields: bool, int, float, str or tuple (of
    ints). UserError for an unknown key, and for a value of another type or out of range."""
    fields = {field.name: field for field in dataclasses.fields(defaults)}
    args, unknown = _parser(defaults, fields).parse_known_args(argv)
    if unknown:
        if unknown[0].endswith(".py") and args.config:
            raise UserError(f"{unknown[0]}: a second config beside {args.config}: expected one")
        key = unknown[0].removeprefix("--").partition("=")[0]
        _check_key("command line", fields, key)
        raise UserError(f"{unknown[0]}: expected --{key}=VALUE")
    values = _read_config(args.config, fields) if args.config else {}
    values |= {key: _checked("command line", fields, key, value)
               for key, value in vars(args).items() if key != "config"}
    config = defaults(**values)
    print("settings: " + ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items()))
    return config


def _parser(defaults, fields):
    """Make the parser. Its --help shows the settings in groups, with types and defaults."""
    parser = Parser(description=sys.modules[defaults.__module__].__doc__,
                    usage="%(prog)s [CONFIG.py] [--setting=VALUE ...]")
    parser.add_argument("config", nargs="?", metavar="CONFIG.py", help="the recipe, from configs/")
    group = parser
    for key, field in fields.items():
        about, kind = field.metadata, type(field.default)
        if about["group"]:
            group = parser.add_argument_group(about["group"])
        comment = about["comment"].replace("%", "%%")
        default = "" if field.default in ("", ()) else f" (default: {field.default})"
        group.add_argument(
            f"--{key}", metavar="|".join(about["choices"] or [TYPES[kind]]),
            default=argparse.SUPPRESS, type=str if kind is str else _literal,
            help=comment + default)
    return parser


def _literal(text):
    """Return the Python value of a text, or the text itself. An empty text is an empty tuple."""
    try:
        return ast.literal_eval(text) if text else ()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text  # _checked says what was expected


def _read_config(path, fields):
    """Run a config file. Returns {key: value} for its settings."""
    if not Path(path).is_file():
        known = {file.stem: file for file in Path("configs").glob("**/*.py")}
        near = difflib.get_close_matches(Path(path).stem, known, n=1)
        hint = f" (did you mean {known[near[0]]}?)" if near else ""
        raise UserError(f"{path}: no such config file{hint}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", 1)  # a SyntaxError knows its own
        raise UserError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    return {key: _checked(path, fields, key, value) for key, value in names.items()
            if not key.startswith("_") and not isinstance(value, types.ModuleType)}


def _check_key(where, fields, key):
    """Raise UserError if no field has this name. It names the one that may be meant: by its name,
    or by its comment (learning_rate is lr, the "highest learning rate")."""
    if key not in fields:
        comments = {field.metadata["comment"]: name for name, field in fields.items()}
        words = key.replace("_", " ")
        described = [comments[text] for text in sorted(comments, key=len) if words in text]
        near = difflib.get_close_matches(key, fields, n=1) or described
        hint = f"did you mean {near[0]}?" if near else "--help lists the keys"
        raise UserError(f"{where}: unknown key '{key}' ({hint})")


def _checked(where, fields, key, value):
    """Return a setting's value in its type; UserError for a wrong key or value."""
    _check_key(where, fields, key)
    least, choices = fields[key].metadata["least"], fields[key].metadata["choices"]
    expected, given = type(fields[key].default), type(value)
    if given is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {key}: the number is too large")
    if expected is tuple and given in (int, list):
        value = (value,) if given is int else tuple(value)
    elif expected is float and given is int:
        value = float(value)
    items = value if type(value) is tuple else ()
    if type(value) is not expected or any(type(item) is not int for item in items):
        name = "tuple of ints" if expected is tuple else expected.__name__
        raise UserError(f"{where}: {key} = {value!r}: expected {name}, found {given.__name__}")
    if least is not None and not least <= value < 2**63:  # nan is in no range
        raise UserError(f"{where}: {key} = {value}: expected at least {least}")
    if choices is not None and value not in choices:
        raise UserError(f"{where}: {key} = {value!r}: expected one of {', '.join(choices)}")
    return value
