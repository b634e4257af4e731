"""
results/changes.py: runs with changes can be continued, and are measured when they are done.
"""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.helpers import ROOT


def change(*argv):
    return subprocess.run([sys.executable, ROOT / "results/changes.py", *argv], check=False,
                          capture_output=True, text=True)


def test_a_widened_run_is_continued_and_measured_when_its_results_are_missing(place):
    for name in ("natural", "natural_docs", "natural_wikitext2"):
        shutil.copytree("data/tiny", f"data/{name}")
    base = ["tiny.py", "--dataset=natural", "--device=cpu", "--max_steps=4", "--out=out/base"]
    assert change("none", *base).returncode == 0
    wide = ["wide_ffn", "tiny.py", "--dataset=natural", "--device=cpu", "--init_from=out/base",
            "--out=out/wide"]
    done = change(*wide, "--max_steps=4")
    assert done.returncode == 0, done.stderr
    results = Path("out/wide/test.json").read_text()
    assert json.loads(results).keys() == {"natural", "natural_docs", "natural_wikitext2", "stale"}
    [snapshot] = Path("out/wide/usage").glob("*.npz")  # of the last step
    for layer, share in json.loads(results)["stale"].items():
        assert share == (np.load(snapshot)[f"layer{layer}_top1"] == 0).mean()
    Path("out/wide/test.json").unlink()  # as after a kill during the measurement
    done = change(*wide, "--max_steps=4")
    assert "nothing to do" in done.stdout and Path("out/wide/test.json").read_text() == results
    Path("out/wide/test.json").unlink()
    done = change(*wide, "--max_steps=6")
    assert done.returncode == 0, done.stderr
    assert Path("out/wide/test.json").read_text() != results


def test_mistakes_are_named_before_training(place):
    for argv, message in ((["none", "tiny.py"], "dataset = tiny: expected natural or natural_bert"),
                          (["nothing", "tiny.py"], "which change? none, slow_search"),
                          ([], "which change? none, slow_search")):
        done = change(*argv)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not Path("out").exists() or not list(Path("out").rglob("step_*"))
