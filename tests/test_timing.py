"""
Times, their table, and the memory of a process.
"""
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from lib import timing


def test_times_are_of_the_timed_rounds_and_ratios_of_the_same_round(monkeypatch):
    clock = [0.0]
    durations = {"slow": iter([50, 2, 3, 8]), "fast": iter([50, 1, 1, 2])}

    def work(name):
        clock[0] += next(durations[name])

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    functions = {name: partial(work, name) for name in durations}
    slow, fast = timing.time_in_turn("work", functions, torch.device("cpu"), rounds=3, warmup=1)
    assert slow == {"what": "work", "system": "slow", "seconds": [2, 3, 8], "times_slow": 1}
    assert fast["seconds"] == [1, 1, 2]
    assert fast["times_slow"] == 1 / 3  # of 1/2, 1/3 and 1/4


def test_several_functions_can_be_the_baseline():
    functions = {name: partial(sum, [1]) for name in "abc"}
    records = timing.time_in_turn("", functions, torch.device("cpu"), rounds=1, bases=2)
    keys = ["what", "system", "seconds", "times_a", "times_b"]
    assert [list(record) for record in records] == [keys] * 3


def test_records_with_the_same_keys_share_a_table(capsys):
    timing.print_times([{"system": "slow", "seconds": [3.0, 2.0, 8.0]}, {"parameters": 1234567},
                        {"system": "fast", "seconds": [1.0, 1.0, 2.0]}])
    table, other = capsys.readouterr().out.strip().split("\n\n")
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:]] == [
        "3000 [2000, 8000] ms", "1000 [1000, 2000] ms"]
    assert "1,234,567" in other


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_is_in_bytes():
    [kilobytes] = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert timing.peak_bytes(torch.device("cpu")) == pytest.approx(1024 * int(kilobytes), rel=0.1)
