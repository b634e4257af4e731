"""
How a script ends.
"""
import importlib
import subprocess
import sys

import pytest

from lib.errors import Failure, UserError, run_main
from tests.helpers import ROOT


def end(capsys, error):
    """Raise an error in main(). Returns (exit status, stderr)."""
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("error, status", [
    (UserError("x"), 2), (FileNotFoundError(2, "x"), 2), (Failure("x"), 1),
    (OSError(28, "x"), 1), (KeyboardInterrupt(), 130),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), 1),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1),
    (MemoryError(), 1)])
def test_an_error_is_one_line_and_a_status(capsys, error, status):
    code, said = end(capsys, error)
    assert code == status and said.count("\n") == 1
    if status != 130:
        assert said.startswith("error: ")
    assert ("smaller batch_size" in said) == ("memory" in str(error) or not str(error)
                                              and status == 1)


def test_an_error_that_nobody_expected_keeps_its_traceback(capsys):
    for error in (RuntimeError("x"), KeyError("x"), AssertionError("x")):
        with pytest.raises(type(error)):
            run_main(lambda raised=error: (_ for _ in ()).throw(raised))


def test_the_status_is_mains():
    for status, code in ((None, None), (0, 0), (143, 143)):
        with pytest.raises(SystemExit) as ended:
            run_main(lambda returned=status: returned)
        assert ended.value.code == code


def test_a_script_that_fails_fails_its_caller():
    code = "from lib.errors import *; run_main(lambda: run_script('prepare_data.py', 'no'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    first, last = done.stderr.splitlines()  # the script's own line, and its caller's
    assert first.startswith("error: ") and "prepare_data.py" in last
    assert "exit status 2" in last and done.returncode == 1


def test_a_package_that_is_missing_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: importlib.import_module("matplotlob.figure"))
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("'matplotlob': pip install matplotlob\n")
