"""
Settings from a config file and the command line.
"""
import argparse
import ast
import dataclasses
import difflib
import inspect
import re
import runpy
import sys
import types
from pathlib import Path

from lib.common.errors import UserError


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


def load_settings(defaults, argv):
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
