"""
Times, and the machine they were measured on.
"""
import functools
import itertools
import os

import pytest
import torch

from lib import timing


def test_times_are_of_the_timed_rounds_and_ratios_of_the_same_round(monkeypatch, capsys):
    clock = [0.0]
    durations = {"slow": iter([50, 2, 3, 8]), "fast": iter([50, 1, 1, 2])}

    def work(name):
        clock[0] += next(durations[name])

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    slow, fast = timing.time_in_turn(
        "work", {name: functools.partial(work, name) for name in durations}, torch.device("cpu"),
        rounds=3, warmup=1)
    assert slow == {"what": "work", "system": "slow", "seconds": [2, 3, 8], "times_slow": 1}
    assert fast["seconds"] == [1, 1, 2] and fast["times_slow"] == 1 / 3  # of 1/2, 1/3, 1/4
    assert "work: warm-up 100.0 s\n" in capsys.readouterr().out
    timing.print_times([slow, fast])
    assert "| slow   | 3000 [2000, 8000] ms |" in capsys.readouterr().out


def test_the_bandwidth_of_a_copy_counts_reads_and_writes(monkeypatch):
    """Four copies of 100 float32 numbers take half a second of this clock."""
    clock = itertools.count(step=0.5)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert timing.copy_bandwidth(torch.device("cpu"), elements=100) == 4 * 2 * 400 / 0.5


def test_what_does_not_fit_is_skipped(capsys):
    assert timing.fits("little", 1, torch.device("cpu"))
    assert not timing.fits("a model", 1e18, torch.device("cpu"))
    assert "skipped: a model needs 1000000000.0 GB" in capsys.readouterr().out


def test_peak_memory_is_in_bytes():
    """As Linux tells it in /proc."""
    if (peak := timing.read_proc("self/status", "VmHWM")) is None:
        pytest.skip("reads Linux's /proc")
    expected = 1024 * int(peak.split()[0])
    assert timing.peak_bytes(torch.device("cpu")) == pytest.approx(expected, rel=0.1)


def test_the_environment_of_openmp_is_kept(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_"))]:
        monkeypatch.delenv(name)
    assert timing.machine_facts(torch.device("cpu"))["openmp"] == "default"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert timing.machine_facts(torch.device("cpu"))["openmp"] == "OMP_WAIT_POLICY=PASSIVE"
