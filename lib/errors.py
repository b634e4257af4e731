"""
End a script: a mistake is one line and an exit status, not a traceback.
"""
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

    A UserError, a missing file and a missing package are one line on stderr and status 2. A
    Failure, another OSError (such as a full disk), a script that fails and a lack of memory are one
    line and status 1. Ctrl-C is status 130. Other errors keep their traceback.
    """
    try:
        sys.exit(main())
    except (UserError, FileNotFoundError) as error:
        status, line = 2, f"error: {error}"
    except ModuleNotFoundError as error:
        status, line = 2, f"error: {error}: pip install {error.name}"
    except (Failure, OSError, subprocess.CalledProcessError) as error:
        status, line = 1, f"error: {error}"
    except KeyboardInterrupt:
        status, line = 130, "interrupted"
    except (RuntimeError, MemoryError) as error:
        text = str(error) or "out of memory"  # Python's own error has no text
        if "out of memory" not in text and "can't allocate memory" not in text:
            raise
        status, line = 1, (f"error: {text.splitlines()[0]} Take a smaller batch_size (and more "
                           "accumulation), fewer tokens or a smaller model")
    print(line, file=sys.stderr)
    sys.exit(status)


def run_script(script, *args):
    """Run another script of this folder as a person would."""
    command = [sys.executable, ROOT / script, *args]
    print(f"$ python {script} {' '.join(args)}", flush=True)
    subprocess.run(command, check=True)
