"""
How a script ends: errors in one line, exit statuses, optional packages.
"""
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # where the scripts are


class UserError(ValueError):
    """The user's mistake: one line on stderr, exit status 2, nothing written."""


class Failure(RuntimeError):
    """Something failed while working: one line on stderr, exit status 1."""


def run_main(main):
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


def run_script(script, *args):
    """Run another script of this folder, as a person would; Failure if it fails."""
    print(f"$ python {script} {' '.join(args)}", flush=True)
    path = ROOT / script
    if subprocess.run([sys.executable, path, *args], check=False).returncode:
        raise Failure(f"python {script} {' '.join(args)} failed")
