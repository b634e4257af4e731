"""
Test reproduce.sh: its commands are understood, in an order in which each finds what it needs.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import bench
import finetune
import measure
import pretrain
from lib import page
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


CLAIMS = [(name, *claim) for name, claims in page.PAPER["claims"].items() for claim in claims]


def exchange(sides, named):
    """Exchange the numbers of a claim's two systems; its sides where that is another claim."""
    lower, higher = [[word for word in re.split(" (?:-|/|per) ", side) if word in named]
                     for side in sides]
    if not higher and len(lower) == 2:  # perplexity (c) / perplexity (a) below 1
        lower, higher = lower[:1], lower[1:]
    if len(lower) != len(higher) or {*lower} & {*higher} or " per " in sides[0]:
        return page.compare(sides[::-1], [named])
    exchanged = zip(lower + higher, higher + lower)
    return page.compare(sides, [{**named, **{name: named[other] for name, other in exchanged}}])


@pytest.mark.parametrize("name, claim, lower, higher", CLAIMS)
def test_the_papers_numbers_hold_and_exchanged_ones_do_not(name, claim, lower, higher):
    sides = [lower, higher]
    named = page.numbers(page.paper_cells(name)) | page.PAPER["in_words"].get(name, {})
    paper = page.compare(sides, [named])
    if not paper:
        return  # a picture, or not legible
    assert page.verdict(paper, paper) == "yes"
    assert page.verdict(exchange(sides, named), paper) == "**no**"
    assert page.verdict(page.compare(sides, [dict.fromkeys(named, 95)]), paper) == "undecided"


def test_the_papers_tables_read_as_ours_give_no_other_word_than_yes():
    holds = [row[1] for name in page.PAPER["claims"]
             for row in page.decide(name, {"0": page.paper_cells(name)}, "paper")]
    assert holds.count("yes") == 44 and set(holds) == {"yes", "no result"}


def test_several_seeds_decide_by_twice_the_standard_error():
    for low, holds in (1, "yes"), (0, "undecided"), (-1, "undecided"), (-2, "undecided"):
        pairs = [(10, 10 + low + more) for more in (0, 1, 2)]  # mean low + 1, twice 1 / sqrt(3)
        assert page.verdict(pairs, []) == holds
    assert page.verdict([(13, 10), (12, 10), (11, 10)], []) == "**no**"
    assert page.verdict([(10, 10.9)], []) == "undecided"  # below 10%
    assert page.verdict([(10, 11.1)], []) == "yes"
    assert page.verdict([(10, 10.9)], [(1, 3)]) == "undecided"  # half of the paper's 2
    assert page.verdict([(10, 8.9)], [(1, 3)]) == "**no**"


def test_a_claim_reads_the_worse_layer_and_the_mean_of_the_tasks():
    cells = {"KL_u": "1.62/0.89", "top-1 MU": "2.2%/84.1%", "MNLI": "84.0/99.0", "SST-2": "86.0"}
    assert page.numbers({"(c) +PKM, N": cells}) == {
        "KL_u (c), N": 1.62, "top-1 MU (c), N": 2.2, "MNLI (c), N": 84, "SST-2 (c), N": 86,
        "score (c), N": 85}


def test_runs_of_one_system_are_its_seeds(tmp_path):
    assert page.system("out/base_500k_more_s1_sst2") == ("(b) +500k steps", "1")
    assert page.system("out/base_sst2_fixed") == ("(a) BERT base", "0")
    cells = {seed: {"(f)": {"top-1 MU": text}} for seed, text in
             (("0", "9.0%/70.0%"), ("1", "10.0%/50.0%"), ("2", "11.0%/60.0%"))}
    assert page.over_seeds(cells) == {"(f)": {"seeds": "3", "top-1 MU": "10.0%/60.0%"}}
    runs = [{"run": f"out/demo{name}", "results": {"docs": [
        {"perplexity": perplexity, "masked_tokens": 1, "layers": {}}]}}
        for name, perplexity in (("", 20), ("_s1", 22), ("_s2", 30), ("_pkm", 10))]
    folder = tmp_path / "reproduce_demo"
    folder.mkdir()
    (folder / "table2.json").write_text(json.dumps({"runs": runs}))
    rows = []
    for name, scores in ("demo_more", (0.5, 0.7)), ("demo_resm_init", (0.6, 0.9)):
        rows.append({"initial model": f"out/{name}", "memory update": "Y", "docs": "1.0 (2)"})
        (folder / f"{name}_docs").mkdir()
        seeds = {seed: {"eval_accuracy": score} for seed, score in enumerate(scores)}
        (folder / f"{name}_docs/eval_results.json").write_text(json.dumps({"seeds": seeds}))
    (folder / "table4.json").write_text(json.dumps(rows))
    page.main(folder)
    text = (folder / "page.md").read_text()
    assert re.search(r"\(a\) BERT base .* 3 +\| 22.00 ", text)
    assert re.search(r"yes +\| perplexity \(c\) / perplexity \(a\) = 0.5 \(0.8948\)[ |]*1[ |]*1 ",
                     text)
    assert re.search(r"yes +\| score \(b\) = 60 \(84\) +\| score \(f\) = 75 .* 2 +\|", text)
