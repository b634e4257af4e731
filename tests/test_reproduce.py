"""
Test reproduce.sh: its commands are understood, in an order in which each finds what it needs.
"""
import json
import os
import shlex
import subprocess
import sys

import pytest

import bench
import finetune
import measure
import prepare_data
import pretrain
from lib.settings import load_settings
from tests.helpers import ROOT, prepare


def reproduce(*args, folder=ROOT):
    """Run reproduce.sh in a folder. Returns what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(["sh", "reproduce.sh", *args], cwd=folder, check=True, text=True,
                          env={**os.environ, "PATH": path}, stdout=subprocess.PIPE)
    return done.stdout


@pytest.mark.parametrize("scale", ["paper", "demo", "quick"])
def test_every_command_is_understood_and_comes_after_what_it_needs(scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bench, "COMMANDS", dict.fromkeys(bench.COMMANDS, lambda args: []))
    for recipe in ("docs", "docs_task", "wikitext", "paper", "glue", "squad", "weights"):
        monkeypatch.setattr(prepare_data, recipe, lambda args: None)
    parse = {
        "pretrain.py": lambda *argv: pretrain.check_config(load_settings(pretrain.Config, argv)),
        "finetune.py": lambda *argv: load_settings(finetune.Config, argv),
        "measure.py": lambda *argv: measure.command_line().parse_args(argv),
        "bench.py": lambda *argv: bench.main(argv),
        "prepare_data.py": prepare,
        "results.page": lambda folder: None,
    }
    made, commands = set(), 0
    for line in reproduce(scale, "--list").splitlines():
        words = shlex.split(line.strip()) if line[:6] in ("python", "torchr", "    ma") else []
        if words[:1] == ["makes"]:
            made |= {words[1], os.path.dirname(words[1])}
        elif words:
            script = next(n for n, word in enumerate(words) if word in parse)
            parse[words[script]](*words[script + 1:])
            read = [word.partition("=")[2] or word for word in words if "--out" not in word]
            assert {path for path in read if path.startswith("out/")} <= made | {words[-1]}
            commands += 1
    assert commands > 40


def test_a_table_and_the_page_stand_beside_the_papers_numbers(tmp_path):
    for path in ROOT.iterdir():
        if path.name in ("reproduce.sh", "bench.py", "results", "configs"):
            (tmp_path / path.name).symlink_to(path)
    assert "python bench.py" in reproduce("quick", "table1", "page", folder=tmp_path)
    out = tmp_path / "out" / "reproduce_quick"
    log = (out / "logs" / "table1").read_text().splitlines()
    [results] = [json.loads(line)["results"] for line in log if line.startswith("{")]
    text = (out / "page.md").read_text()
    assert f"{results[0]['batches/s']:.3g}" in text and "(79.8)" in text
    assert "sh reproduce.sh quick table2" in text
    assert "python bench.py" not in reproduce("quick", "table1", folder=tmp_path)
