"""
Test reproduce.sh: its commands are understood, in an order in which each finds what it needs.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys

import pytest

import bench
import finetune
import measure
import pretrain
from lib.settings import load_settings
from tests.helpers import ROOT, prepare


def reproduce(*args, folder=ROOT):
    """Run reproduce.sh in a folder. Returns what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(["sh", "reproduce.sh", *args], cwd=folder, check=True, text=True,
                          env={**os.environ, "PATH": path}, stdout=subprocess.PIPE)
    return done.stdout


class Understood(Exception):
    """End a command whose arguments were parsed, before it begins its work."""


def stop_after_parsing(monkeypatch, name):
    """Let argparse's function `name` raise Understood if it knows every argument."""
    parse = getattr(argparse.ArgumentParser, name)

    def check(*args):
        found = parse(*args)
        assert not isinstance(found, tuple) or not found[1]  # unknown ones
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, name, check)


@pytest.mark.parametrize("scale", ["paper", "demo", "quick"])
def test_every_command_is_understood_and_comes_after_what_it_needs(scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    stop_after_parsing(monkeypatch, "parse_args")
    stop_after_parsing(monkeypatch, "parse_known_intermixed_args")
    parse = {
        "pretrain.py": lambda *argv: pretrain.check_config(load_settings(pretrain.Config, argv)),
        "finetune.py": lambda *argv: load_settings(finetune.Config, argv),
        "measure.py": lambda *argv: measure.main(argv),
        "bench.py": lambda *argv: bench.main(argv),
        "prepare_data.py": prepare,
        "lib.page": lambda folder: None,
    }
    made, commands = set(), 0
    for line in reproduce(scale, "--list").splitlines():
        words = shlex.split(line.strip()) if line[:6] in ("python", "torchr", "    ma") else []
        if words[:1] == ["makes"]:
            made |= {words[1], os.path.dirname(words[1])}
        elif words:
            script = next(n for n, word in enumerate(words) if word in parse)
            try:
                parse[words[script]](*words[script + 1:])
            except Understood:
                pass
            read = [word.partition("=")[2] or word for word in words if "--out" not in word]
            assert {path for path in read if path.startswith("out/")} <= made | {words[-1]}
            commands += 1
    assert commands > 40


def test_pretraining_takes_the_most_gpus_that_divide_the_batch(monkeypatch):
    for gpus, ranks in ("3", 1), ("0,1,2", 2), ("0,1,2,3,4,5", 4), ("0,1,2,3,4,5,6,7", 8):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert f"--nproc_per_node={ranks} pretrain" in reproduce("paper", "pretrain", "--list")


def test_a_table_and_the_page_stand_beside_the_papers_numbers(tmp_path):
    for path in ROOT.iterdir():
        if path.name in ("reproduce.sh", "bench.py", "results", "configs"):
            (tmp_path / path.name).symlink_to(path)
    assert "python bench.py" in reproduce("quick", "table1", "page", folder=tmp_path)
    out = tmp_path / "out" / "reproduce_quick"
    log = (out / "logs" / "table1").read_text().splitlines()
    [results] = [json.loads(line)["results"] for line in log if line.startswith("{")]
    text = (out / "page.md").read_text()
    assert f"{results[0]['batches/s']:.3g}" in text
    assert "(79.8)" in text
    assert "sh reproduce.sh quick table2" in text
    assert "python bench.py" not in reproduce("quick", "table1", folder=tmp_path)
