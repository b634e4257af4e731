"""
Apply the change of docs/change.md to a copy of the code: it trains, resumes, measures and exports.
"""
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT, train

CHANGED = """
import finetune, measure, pretrain
from for_transformers.export import export
from lib.run import Run
from lib.weights import load_model
from transformers import AutoModelForMaskedLM
import torch

assert pretrain.main(["tiny.py", "--max_steps=4"]) == 0  # the old run goes on
assert Run("out/tiny").settings()["gate"] is False
more = ["--max_steps=4", "--gate=True", "--init_from=out/tiny", "--out=out/gated"]
assert pretrain.main(["tiny.py", *more]) == 0
measure.main(["table", "out/tiny", "out/gated", "--data", "tiny", "--device", "cpu"])
export("out/gated", "exported")
ours = load_model("out/gated").eval()
theirs = AutoModelForMaskedLM.from_pretrained("exported", trust_remote_code=True).eval()
assert ours.bert.layers[1].memory.gate.bias.any()  # it was trained
ids = torch.randint(5, 25, (2, 16))
with torch.no_grad():
    assert (theirs(ids).logits - ours(ids)).abs().max() < 1e-6
"""


def test_the_change_of_the_guide(place):
    pytest.importorskip("transformers")
    assert train("--max_steps=2") == 0
    for name in ("lib", "for_transformers"):
        shutil.copytree(ROOT / name, name)
    for script in ROOT.glob("*.py"):
        shutil.copy(script, ".")
    diff = re.search("```diff\n(.*?)```", (ROOT / "docs" / "change.md").read_text(), re.DOTALL)
    subprocess.run(["git", "apply"], input=diff[1], text=True, check=True)
    subprocess.run([sys.executable, "-c", CHANGED], check=True)
