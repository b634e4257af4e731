"""
End a script: errors in one line, exit statuses, optional packages.
"""
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]  # where the scripts are


class UserError(ValueError):
    """The user's mistake: one line on stderr, exit status 2, nothing written."""


class Failure(RuntimeError):
    """A failure at work: one line on stderr, exit status 1."""


def run_main(main):
    """Call main() and end the process with its exit status.

    An error becomes one line on stderr and a status: 2 for a UserError, 130 for Ctrl-C, 1 for a
    Failure, an OSError (such as a full disk) or text that a terminal or a file cannot take. Other
    errors keep their traceback.
    """
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
    except UnicodeError as error:
        print(f"error: {error}: set PYTHONIOENCODING=utf-8 if the terminal or the file that you "
              "write to is UTF-8", file=sys.stderr)
        sys.exit(1)
    except (RuntimeError, MemoryError) as error:
        if not (advice := advise(error)):
            raise
        text = str(error).partition("\n")[0] or "out of memory."  # Python's own has no text
        print(f"error: {text} {advice}", file=sys.stderr)
        sys.exit(1)


def flush_stdout():
    """Write what was printed while an error can still be caught. Python would do it at its end.
    After an error stdout is /dev/null, because Python would report the error again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def advise(error):
    """Say what helps against an error of torch, or return None. Errors of memory have no own type
    on a CPU and on MPS."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in (
            "out of memory", "can't allocate memory")):
        return ("Take a smaller batch_size (and more accumulation), fewer tokens or a smaller "
                "model")
    if isinstance(error, NotImplementedError) and "MPS device" in str(error):
        return "Or take --device=cpu"
    return None


def need(module, purpose):
    """Import an optional package, or raise a UserError that names it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"{purpose} needs a package: pip install {package}") from None


def run_script(script, *args):
    """Run another script of this folder as a person would; Failure if it fails."""
    command = " ".join(["python", script, *args])
    print(f"$ {command}", flush=True)
    if subprocess.run([sys.executable, ROOT / script, *args], check=False).returncode:
        raise Failure(f"{command} failed")
