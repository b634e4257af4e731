"""
Progress bars, durations and Markdown tables.
"""
import itertools
import sys

import pytest
import tqdm

from lib.device import Progress, duration, markdown


def test_progress_on_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    """And on a terminal a bar that is drawn again and again."""
    clock = itertools.count(step=4)
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(clock)))
    monkeypatch.setattr(Progress, "monitor_interval", 0)
    assert list(Progress(range(10), "reading")) == list(range(10))
    lines = capsys.readouterr().err.strip("\r").splitlines()
    assert 2 <= len(lines) <= 5 and all(line.startswith("reading: ") for line in lines)
    assert "/10 [" in lines[0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(Progress(range(10), "reading"))
    assert capsys.readouterr().err.count("\rreading: ") > 3


@pytest.mark.parametrize("seconds, text", [
    (59.6, "0:01:00"), (90061, "1 day, 1:01:01"), (2.0**63, "925925925 days, 22:13:20")])
def test_a_duration(seconds, text):
    assert duration(seconds) == text


def test_a_table_in_markdown():
    assert markdown(["name", "x|y"], [["a", 1.234], ["long one", None]]) == (
        "| name     | x\\|y |\n| -------- | ---- |\n| a        | 1.23 |\n| long one |      |\n")
