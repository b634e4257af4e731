"""
How a script ends.
"""
import importlib
from functools import partial

import pytest

import lib.errors
from lib.errors import Failure, UserError, run_main, run_script


def fail(error):
    raise error


def end(capsys, main):
    """Returns (exit status, stderr)."""
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("error, status, words", [
    (UserError("x"), 2, "error: x\n"), (FileNotFoundError(2, "x"), 2, "error: "),
    (Failure("x"), 1, "error: x\n"), (OSError(28, "x"), 1, "error: "),
    (KeyboardInterrupt(), 130, "interrupted\n"), (MemoryError(), 1, "smaller batch_size"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), 1, "smaller batch_size"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "smaller batch")])
def test_an_error_is_one_line_and_a_status(capsys, error, status, words):
    code, said = end(capsys, partial(fail, error))
    assert code == status and said.count("\n") == 1 and words in said


def test_an_error_that_nobody_expected_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="x"):
        run_main(partial(fail, RuntimeError("x")))


def test_the_status_is_mains(capsys):
    for status in (None, 0, 143):
        assert end(capsys, lambda returned=status: returned) == (status, "")


def test_a_script_that_fails_fails_its_caller(tmp_path, monkeypatch, capsys):
    (tmp_path / "no.py").write_text("raise SystemExit(2)")
    monkeypatch.setattr(lib.errors, "ROOT", tmp_path)
    code, said = end(capsys, lambda: run_script("no.py"))
    assert code == 1 and "no.py" in said and "exit status 2" in said


def test_a_package_that_is_missing_is_named(capsys):
    code, said = end(capsys, lambda: importlib.import_module("matplotlob.figure"))
    assert code == 2 and said.endswith("'matplotlob': pip install matplotlob\n")
