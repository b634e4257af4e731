"""
Pretraining's edges: what is refused before it begins, dry runs, checkpoints by the clock, resuming
with other data, and warnings.
"""
import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from lib.training.dry_run import RandomBatches

import pretrain
from lib.distributed import my_micro_batches
from lib.errors import UserError
from lib.run import Run
from lib.settings import load_settings
from lib.training import Trainer, find_warnings
from tests.helpers import ROOT, TINY, assert_one_line, files, log, prepare, steps_saved, train


def test_a_warm_up_longer_than_the_run_is_refused(place, capsys):
    assert_one_line(capsys, "tiny.py", "--warmup_steps=13",
                    words=["warmup_steps = 13", "max_steps = 12", "--warmup_steps=1"])
    assert train("--warmup_steps=12", "--eval_interval=100") == 0


@pytest.mark.parametrize("out, words", [
    ("/", "/: expected the path of a folder"), ("tiny.txt", "tiny.txt: expected the path of a"),
    ("out", "out: a link to nowhere, which is not there")])
def test_a_place_where_no_run_can_be(place, capsys, out, words):
    Path("out").symlink_to("nowhere")
    assert_one_line(capsys, "tiny.py", f"--out={out}", words=[words])


def test_a_run_in_a_folder_that_is_a_link(place):
    """The link is followed: by the lock, by checkpoints, by a resumed run."""
    Path("scratch").mkdir()
    Path("out").mkdir()
    Path("out/tiny").symlink_to("../scratch")
    assert train("--max_steps=2") == 0 and train("--max_steps=4") == 0
    assert Path("out/tiny").is_symlink() and steps_saved("scratch") == 4
    assert train("--max_steps=4", "--out=scratch") == 0


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.py")), ids=lambda path: path.stem)
def test_the_settings_of_each_config_fit_together(path, capsys):
    if "finetune" not in path.stem:
        pretrain.check_config(load_settings(pretrain.Config, [str(path)]))


@pytest.mark.parametrize("accumulation, batch_size, world_size, flags", [
    (1, 32, 2, "--batch_size=16 --accumulation=2, which keep 32 sequences a step"),
    (5, 2, 2, "--batch_size=1 --accumulation=10, which keep 10 sequences a step"),
    (3, 4, 2, "--batch_size=3 --accumulation=4, which keep 12 sequences a step"),
    (1, 32, 3, "--accumulation=3"), (1, 0, 4, "--accumulation=4")])
def test_the_error_names_flags_that_work(monkeypatch, accumulation, batch_size, world_size, flags):
    monkeypatch.setattr("lib.distributed.get_world_size", lambda: world_size)
    with pytest.raises(UserError, match=f"use {flags}$"):
        my_micro_batches(accumulation, batch_size)
    numbers = {key: int(n) for key, n in re.findall(r"--(\w+)=(\d+)", flags)}
    assert len(my_micro_batches(**{"batch_size": batch_size, **numbers})) > 0


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_a_dry_run_tells_a_checkpoints_size(place, capsys, objective):
    """Within a few percent of a real checkpoint's files. It needs neither a corpus nor weights."""
    args = f"--objective={objective}", "--n_keys=32"
    assert train(*args, "--max_steps=2", "--eval_interval=100") == 0
    real = sum(file.stat().st_size for file in Path("out/tiny/step_000002").iterdir())
    shutil.rmtree("out")
    before = files()
    capsys.readouterr()
    for dataset, words in (("tiny", "a vocabulary of data/tiny, 25 tokens"),
                           ("none", "a vocabulary of Google's BERT (no data/none), 30,522 tokens")):
        assert train(*args, "--dry_run=True", "--init_from=out/none", f"--dataset={dataset}",
                     "--max_steps=3600") == 0
        said = capsys.readouterr().out
        assert words in said and files() == before
        seconds = float(re.search(r"^(\S+) s a step", said, re.MULTILINE)[1])
        hours, minutes, rest = map(int, re.search(r"3,600 steps take (\d+):(\d+):(\d+)",
                                                  said).groups())
        assert 3600 * hours + 60 * minutes + rest == pytest.approx(3600 * seconds, rel=0.02)
        assert float(re.search(r"peak memory: (\S+) GB on cpu", said)[1]) > 0.05
        size = 1e9 * float(re.search(r"a checkpoint: (\S+) GB", said)[1])
        if dataset == "tiny":
            assert size == pytest.approx(real, rel=0.04)
        else:
            assert size > 4 * 64 * 30_522 * 3  # the words and their moments


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_random_batches_have_the_shapes_of_training(place, objective):
    config = pretrain.Config(**TINY, objective=objective)
    make = pretrain.CausalBatches if objective == "causal" else pretrain.MaskedBatches
    real, drawn = make(pretrain.open_corpus("tiny"), config), RandomBatches(config)
    shapes = [{name: (a.shape, a.dtype) for name, a in batches.get(0, 1).items()}
              for batches in (real, drawn)]
    assert shapes[0] == shapes[1]
    for name in ("accumulation", "size", "unit"):
        assert getattr(real, name) == getattr(drawn, name)
    assert real.loss_weight(0, 1) == drawn.loss_weight(0, 1)


def test_checkpoints_by_the_clock(place, monkeypatch):
    """On this clock a step takes 25 seconds. A checkpoint of checkpoint_interval counts, too; the
    run is the same as without the clock."""
    clock, step, saved = [0.0], Trainer.step, []

    def slow(trainer, n):
        clock[0] += 25
        return step(trainer, n)

    save = Run.save_checkpoint
    monkeypatch.setattr(Trainer, "step", slow)
    monkeypatch.setattr(Run, "save_checkpoint",
                        lambda run, n, *rest: saved.append(n) or save(run, n, *rest))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert train("--checkpoint_minutes=1", "--checkpoint_interval=5") == 0
    assert saved == [3, 5, 8, 10, 12]
    saved.clear()
    assert train("--checkpoint_interval=5", "--out=out/other") == 0
    assert saved == [5, 10, 12]
    ends = [torch.load(f"out/{name}/step_000012/model.pt", weights_only=True)["weights"]
            for name in ("tiny", "other")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert log("out/tiny") == log("out/other")


def test_a_resumed_run_has_the_same_data(place, capsys):
    """A corpus that is prepared anew under its name is another one, with the same vocabulary."""
    assert train("--max_steps=2") == 0
    saved = json.loads(Path("out/tiny/config.json").read_text())
    meta = json.loads(Path("data/tiny/meta.json").read_text())
    assert saved["data"] == meta["sha256"] and saved["torch"] == torch.__version__
    assert saved["threads"] == torch.get_num_threads() and saved["commit"] and saved["ranks"] == 1
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace("cat", "dog", 3))
    again = "text", "tiny", "text.txt", "--vocab", "tiny.txt", "--val_every", "10", "--force"
    prepare(*again)
    assert_one_line(capsys, "tiny.py", "--max_steps=4",
                    words=["out/tiny was trained on other data: t", "--out=out/NAME"])
    Path("text.txt").write_text(text)
    prepare(*again)
    saved["threads"] += 1
    Path("out/tiny/config.json").write_text(json.dumps(saved))
    capsys.readouterr()
    assert train("--max_steps=4") == 0
    threads = torch.get_num_threads()
    assert f"since the last start: threads {threads + 1} -> {threads};" in capsys.readouterr().out
    assert json.loads(Path("out/tiny/config.json").read_text())["threads"] == threads


def evaluation(step, perplexity, **usage):
    return {"step": step, "perplexity": perplexity,
            "layers": {layer: {"top1_mu": share} for layer, share in usage.items()}}


def test_warnings():
    """Each rule fires on one side of its limit, and not on the other."""
    def found(*evaluations, initialized=True):
        return find_warnings(list(evaluations), 100, initialized)

    start = evaluation(0, 30.0, two=0.9, three=0.6)
    assert not found(start)
    assert not found(start, evaluation(24, 99.0, two=0.61, three=0.41))  # less than a quarter
    assert not found(start, evaluation(25, 29.9, two=0.61, three=0.41))
    warning = found(start, evaluation(25, 30.1, two=0.61, three=0.41))
    assert warning.keys() == {"perplexity"}
    assert "after 25 of 100 steps the perplexity, 30.10, is still above" in warning["perplexity"]
    assert "30.00" in warning["perplexity"]
    later = evaluation(10, 20.0, two=0.95, three=0.5), evaluation(20, 20.0, two=0.62, three=0.39)
    warning = found(start, *later)
    assert warning.keys() == {"layer two", "layer three"}
    assert "fell from 95.0% at step 10 to 62.0% at step 20" in warning["layer two"]
    assert "fell from 60.0% at step 0 to 39.0% at step 20" in warning["layer three"]
    # a model that begins at random
    assert not found(start, evaluation(50, 99.0, two=0.1, three=0.1), initialized=False)
    assert not found(start, *later, initialized=False)
    fallen = evaluation(50, 9.0, two=0.3, three=0.5), evaluation(60, 9.0, two=0.19, three=0.4)
    assert found(start, *fallen, initialized=False).keys() == {"layer two"}


def test_a_run_warns_once_also_when_it_is_resumed(place, monkeypatch, capsys):
    assert train("--max_steps=4", "--eval_interval=100") == 0
    assert not [record for record in log() if "warning" in record]
    evaluate, perplexities = pretrain.evaluate_language_model, iter([20.0, 99.0, 98, 97, 96, 95])

    def worse(*args):
        results, counts = evaluate(*args)
        for layer in results["layers"].values():
            layer["top1_mu"] = 0.5
        return {**results, "perplexity": next(perplexities)}, counts

    monkeypatch.setattr(pretrain, "evaluate_language_model", worse)
    args = ["--init_from=out/tiny", "--out=out/more", "--eval_interval=2",
            "--checkpoint_interval=2", "--max_steps=8", "--tensorboard=False"]
    capsys.readouterr()
    monkeypatch.setattr(pretrain, "catch_signals", lambda: [15] if steps_saved("out/more") < 1
                        else [])  # stops after the first step
    while steps_saved("out/more") < 8:
        train(*args)
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1
    [record] = [record for record in log("out/more") if "warning" in record]
    assert record["about"] == "perplexity" and f"warning: {record['warning']}\n" in said
    assert record["step"] == 2 and "after 2 of 8 steps the perplexity, 98.00" in record["warning"]
