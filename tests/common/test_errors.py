"""
The end of a script whose output cannot be written, or whose device fails.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


def end(code, stdout):
    """Run a script whose main() is `code`, with buffered output, and return how it ended."""
    script = f"import sys, lib.errors; lib.errors.run_main(lambda: {code})"
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=buffered, stdout=stdout,
                          stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("code, status", [
    ("print(1)", 141), ("sys.exit(0)", 0), ("(print(1), sys.exit(0))", 141)])
def test_a_closed_pipe_is_no_error(code, status):
    """As in `python measure.py ... | head`, also if all output is written at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    done = end(code, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = end("print(1)", stdout=full)
    assert done.returncode == 1 and done.stderr.startswith("error: [Errno 28]")
    assert done.stderr.count("\n") == 1


def test_a_terminal_that_cannot_show_a_text_is_one_line(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = end("print('caf' + chr(233))", stdout=subprocess.DEVNULL)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: 'ascii' codec can't encode character '\\xe9' in position")
    assert "PYTHONIOENCODING=utf-8" in done.stderr


@pytest.mark.parametrize("error, advice", [
    (("NotImplementedError('Not implemented for the MPS device. "
      "Set PYTORCH_ENABLE_MPS_FALLBACK=1.')"),
     "FALLBACK=1. Or take --device=cpu"),
    ("RuntimeError('MPS backend out of memory (MPS allocated: 8 GB).\\nmore')",
     "8 GB). Take a smaller batch_size"),
    ("RuntimeError('CUDA error: out of memory')", "out of memory Take a smaller batch_size"),
    ("MemoryError()", "out of memory. Take a smaller batch_size")])
def test_errors_of_a_device_are_one_line_with_advice(error, advice):
    done = end(f"(_ for _ in ()).throw({error})", stdout=subprocess.DEVNULL)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and advice in done.stderr


def test_an_error_that_nobody_expected_keeps_its_traceback():
    done = end("(_ for _ in ()).throw(NotImplementedError('x'))", stdout=subprocess.DEVNULL)
    assert "Traceback" in done.stderr
