"""
TensorBoard's curves, read back by TensorBoard itself.
"""
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lib.common.errors import UserError
from tests.helpers import ROOT, command, log, steps_saved, train, tune

KILLED = """
import os, signal, sys, pretrain
import lib.training.trainer as training
save, wanted = training.Trainer.save, int(sys.argv.pop())
def killed(self, run, state):
    if state.step == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, run, state)
training.Trainer.save = killed
pretrain.main(sys.argv[1:])
"""


def read_events(run):
    """{tag: [(step, value), ...]} of all event files of a folder."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(run), size_guidance={events.SCALARS: 0}).Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


def assert_are_the_logs(run):
    """The curves are the log's numbers: no point twice, none missing."""
    expected = {}
    for record in log(run):
        groups = {f"layer {n}": each for n, each in record.get("layers", {}).items()}
        groups["train" if "lr" in record else "eval"] = record
        for group, numbers in groups.items():
            for name in numbers.keys() - {"step", "layers"}:
                expected.setdefault(f"{group}/{name}", []).append((record["step"], numbers[name]))
    found = read_events(run)
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        assert [value for _, value in found[tag]] == pytest.approx([v for _, v in points], rel=1e-6)
    return found


def test_a_killed_run_goes_on_without_a_point_twice(place):
    pytest.importorskip("tensorboard")
    settings = "--tensorboard=True", "--log_interval=1", "--eval_interval=2"
    kill = [sys.executable, "-c", KILLED, *command(*settings)[2:], "10"]
    assert subprocess.run(kill, cwd=place, env={"PYTHONPATH": str(ROOT)},
                          check=False).returncode == -signal.SIGKILL
    assert steps_saved("out/tiny") == 5 and log()[-1]["step"] == 10  # steps 6 to 10 come again
    assert_are_the_logs("out/tiny")
    assert train(*settings) == 0
    found = assert_are_the_logs("out/tiny")
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    assert {"train/lr", "train/tokens_per_s", "eval/perplexity", "eval/loss", "layer 2/top1_mu",
            "layer 3/top1_mu"} <= found.keys()
    shutil.rmtree("out/tiny/step_000012")
    shutil.rmtree("out/tiny/step_000010")
    assert train(*settings, "--max_steps=4") == 0  # without a checkpoint all begins anew
    assert assert_are_the_logs("out/tiny")["eval/perplexity"][0][0] == 0


def test_curves_of_fine_tuning(tuned):
    pytest.importorskip("tensorboard")
    assert tune("--epochs=1", "--tensorboard=True") == 0
    found = assert_are_the_logs("out/tiny_own/seed0")
    assert {"train/loss", "train/examples_per_s", "eval/accuracy"} <= found.keys()


def test_without_the_package(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="tensorboard = True needs a package: pip install "
                                               "tensorboard"):
        train("--tensorboard=True")
    assert not Path("out").exists()
