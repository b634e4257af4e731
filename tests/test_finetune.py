"""
Fine-tune: what it leaves and learns, and that no kill or signal changes it.
"""
import itertools
import json
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import finetune
from lib.run import Run
from lib.settings import load_settings
from lib.tasks import TASKS, find_task, load_examples, predict_examples
from lib.tokenizer import text_tokenizer
from lib.training import seed_dropout
from lib.weights import find_weights, init_from, load_model, read_weights
from model import build_model
from tests.helpers import (
    assert_equal_runs,
    assert_one_line,
    before_update,
    files,
    interrupt,
    log,
    steps_saved,
    train,
    trains_pooler,
    tune,
    write_settings,
)
from tests.on_ranks import finish, start


def scores(run):
    return json.loads(Path(run, "eval_results.json").read_text())


def table(path):
    return [line.split("\t") for line in Path(path).read_text().splitlines()]


def test_a_fine_tuned_run_leaves_what_it_promises(tuned):
    args = ["--seeds=3", "--train_examples=64", "--out=out/run"]
    assert tune(*args) == 0
    run = Path("out/run/seed1")
    assert sorted(os.listdir(run)) == ["best", "config.json", "eval_results.json", "log.jsonl",
                                       "predictions_dev.tsv", "vocab.txt"]
    each = [scores(f"out/run/seed{n}") for n in range(3)]
    evaluations = {r["epoch"]: r["accuracy"] for r in log(run) if "accuracy" in r}
    assert list(evaluations) == [1, 2, 3]
    assert each[1] == {"metric": "accuracy", "eval_accuracy": max(evaluations.values()),
                       "eval_epoch": max(evaluations, key=evaluations.get)}
    summary = scores("out/run")
    assert summary["eval_accuracy"] == sorted(r["eval_accuracy"] for r in each)[1]
    assert list(summary["seeds"].values()) == each

    header, *found = table(run / "predictions_dev.tsv")
    assert header == ["index", "sentence", "label", "prediction", "probability"]
    assert [row[1:3] for row in found] == table("own/dev.tsv")[1:]
    assert np.mean([row[2] == row[3] for row in found]) == each[1]["eval_accuracy"]
    assert read_weights(run)["labels"] == ["animal", "none"]
    middle = sorted(range(3), key=lambda n: each[n]["eval_accuracy"])[1]
    seed = Path(f"out/run/seed{middle}")
    assert find_weights("out/run") == (seed / "best", seed / "vocab.txt")

    before = files()
    shutil.copytree("out/tiny/step_000004", run / "step_000075")  # killed before it was removed
    assert tune(*args) == 0 and files() == before


def test_the_best_epoch_counts(tuned):
    """Take the first of equal epochs, and a nan as worse than any number.

    The weights in best/ are those that were scored, and so are the predictions, in the run's dtype.
    An epoch is one update of no size, after which the head is a multiple of what it was: twice as
    large predictions have the same correlation, those of 0 have none.
    """
    factors, heads = [0.0, -1.0, 1.0, 2.0, -1.0], []
    with Path("pairs/dev.tsv").open("a") as dev:
        dev.write("the .\tthe .\t2.4\n")

    def scale(optimizer, *args):
        if isinstance(optimizer, torch.optim.AdamW):
            [head] = [p for p in optimizer.param_groups[0]["params"] if p.shape == (1, 64)]
            heads.append(heads[0] if heads else head.detach().clone())
            head.data = heads[0] * factors[len(heads) - 1]

    with register_optimizer_step_post_hook(scale):
        assert tune("--task=pairs", "--epochs=5", "--train_examples=8", "--lr=1e-30",
                    "--update_memory=False", "--out=out/run", "--dtype=bfloat16") == 0
    run = Path("out/run/seed0")
    nothing, low, *high, last = [r["pearson"] for r in log(run) if "pearson" in r]
    assert nothing is None and low == last < high[0] == high[1]
    assert scores(run)["eval_epoch"] == 3 and scores(run)["eval_pearson"] == high[0]
    assert scores(run)["metric"] == "pearson"  # the first of two
    best = load_model(run)
    assert torch.equal(best.head.weight, heads[0])
    dev = load_examples(find_task("pairs"), "dev", text_tokenizer("tiny.txt"), 32, 128)
    expected = [f"{score:.3f}" for [score] in predict_examples(best, dev, 8, torch.bfloat16)]
    _, *rows = table(run / "predictions_dev.tsv")
    assert [row[-1] for row in rows] == expected
    assert rows[-1][3] == "2.4"  # not float32's neighbour of it


@pytest.mark.parametrize("accuracies, accuracy, epoch", [
    ([0.9, 0.1, 0.2], 0.2, 1), ([0.9, 0.1, 0.2, 0.3], 0.25, 1.5),
    ([math.nan, 0.1, 0.2, 0.9], 0.2, 2), ([math.nan, math.nan], math.nan, 0.5)])
def test_medians_are_no_means(tmp_path, capsys, accuracies, accuracy, epoch):
    """Each score has its own median. A seed that is not done does not count.

    A seed of nan is left out of both medians, and said, unless all are.
    """
    for seed in range(len(accuracies) + 1):
        folder = tmp_path / f"seed{seed}"
        write_settings(folder, task="rte", seed=seed)
        if seed < len(accuracies):
            Run(folder).write_results({"metric": "accuracy", "eval_accuracy": accuracies[seed],
                                       "eval_epoch": seed})
    finetune.write_medians(TASKS["rte"], tmp_path)
    found = Run(tmp_path).results()
    assert "NaN" not in Path(tmp_path, "eval_results.json").read_text()  # which JSON has not
    numbers = [found[name] for name in ("eval_accuracy", "eval_epoch")]
    numbers += [seed["eval_accuracy"] for seed in found["seeds"].values()]
    assert numbers == pytest.approx([accuracy, epoch, *accuracies], nan_ok=True)
    said, one_is_nan = capsys.readouterr().out, math.isnan(accuracies[0]) and accuracy > 0
    assert f"median of {len(accuracies) - one_is_nan}: accuracy {accuracy}" in said
    assert ("seed 0 is left out" in said) == one_is_nan


def test_seeds_share_a_subset_and_draw_all_else(tuned, monkeypatch):
    """Draw the head, the order and the dropout anew. Three batches are an epoch of 11 examples."""
    def look(module, inputs):
        if module.training and getattr(module, "num_embeddings", 0) == 25:
            texts.extend(row[row > 0].tolist() for row in inputs[0])

    texts, drawn = [], []
    monkeypatch.setattr(torch, "manual_seed", drawn.append)
    with register_module_forward_pre_hook(look):
        for seed in (3, 4):
            assert tune(f"--seed={seed}", "--train_examples=11", "--batch_size=2", "--epochs=2",
                        "--accumulation=2") == 0
    seeds, drawn[:] = drawn[:], []
    for seed in (3, 4):
        torch.manual_seed(seed)
        for key in itertools.product([seed], range(6), range(2)):
            seed_dropout(*key)
    assert seeds == drawn and len(set(drawn)) == 2 * (1 + 6 * 2)
    epochs = [texts[n:n + 11] for n in range(0, 44, 11)]
    assert len(texts) == 44 and all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(str, epochs))) == 4
    examples = load_examples(find_task("own"), "train", text_tokenizer("tiny.txt"), 32, 128)
    subset = np.random.default_rng(0).permutation(200)[:11]  # of all, not the first ones
    assert sorted(epochs[0]) == sorted(examples[n].ids.tolist() for n in subset)
    found = [(r["step"], r["epoch"]) for r in log("out/tiny_own/seed4") if "accuracy" in r]
    assert found == [(3, 1), (6, 2)]


def test_uneven_batches_train_as_whole_ones(tuned):
    """Split 9 examples, and the last 4 of an epoch, into 1 and 3 parts, in float64."""
    args = ["tune.py", "--train_examples=13", "--epochs=2", "--dropout=0", "--update_memory=False"]
    finish(*(start(0, finetune.main, [*args, f"--batch_size={9 // n}", f"--accumulation={n}",
                                      f"--out=out/{n}"], float64=True) for n in (1, 3)))
    ours, theirs = (read_weights(f"out/{n}")["weights"] for n in (3, 1))
    for name, w in theirs.items():
        torch.testing.assert_close(ours[name], w, rtol=1e-9, atol=1e-12, msg=name)


def test_a_last_step_with_fewer_examples_than_micro_batches_is_left_out(tuned):
    """Of 14 examples in steps of 3 x 4, each epoch trains on 12, and of 15 on all."""
    examples = load_examples(find_task("own"), "train", text_tokenizer("tiny.txt"), 32, 128)
    for number, trained in ((14, 12), (15, 15)):
        settings = finetune.Settings(batch_size=4, accumulation=3, max_steps=4)
        batches = finetune.TrainingBatches(examples[:number], settings)
        assert batches.steps_per_epoch == math.ceil(trained / 12)
        epoch = batches.steps[:batches.steps_per_epoch]
        assert len(set(np.concatenate(epoch))) == trained
        for step, index in enumerate(epoch):
            weights = [batches.get(step, micro)[1] for micro in range(3)]
            assert sum(weights) == pytest.approx(1) and min(weights) == len(index) // 3 / len(index)


def test_settings_of_fine_tuning_are_used(tuned, capsys):
    """Cut a paragraph of 36 tokens into 4 windows of 18 that begin 8 apart."""
    args = ["--max_len=24", "--doc_stride=8", "--seed=3", "--seeds=2", "--dropout=0.3"]
    more = ["--max_steps=8", "--warmup=0.5", "--log_interval=1"]
    assert tune("--task=squad", *args, *more) == 0
    assert "train-v1.1.json: 8 examples" in capsys.readouterr().out  # of two questions
    assert list(scores("out/tiny_squad")["seeds"]) == ["3", "4"]
    assert load_model("out/tiny_squad").bert.config.dropout == 0.3
    found = [r["lr"] for r in log("out/tiny_squad/seed4") if "grad_norm" in r]
    assert found == pytest.approx([5e-3 * min((n + 1) / 4, (8 - n) / 4) for n in range(8)])


def test_a_frozen_memory_keeps_its_whole_state(tuned, monkeypatch):
    """Keep weights, values and statistics, on two ranks, compiled and after four epochs.

    All else moves. This is the paper's Table 5.
    """
    args = ["--update_memory=False", "--train_examples=16", "--batch_size=8", "--epochs=4",
            "--accumulation=2"]  # batches of few shapes, each of which is compiled
    ranks = start(2, finetune.main, ["tune.py", *args, "--out=out/ranks"])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with before_update(4, interrupt(signal.SIGTERM)):  # the last checkpoint stays
        assert tune(*args, "--compile=on") == 128 + signal.SIGTERM
    finish(ranks)
    before = read_weights("out/tiny")["weights"]
    for run in ("out/tiny_own_fixed/seed0/step_000004", "out/ranks"):
        after = read_weights(run)["weights"]
        for name in before.keys() & after.keys():
            assert torch.equal(before[name], after[name]) == (".memory." in name), name
    assert tune("--train_examples=32") == 0
    after = read_weights("out/tiny_own")["weights"]
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())


def test_seeds_run_side_by_side(tuned):
    finish(*(start(0, finetune.main, ["tune.py", "--train_examples=64", f"--seed={seed}"])
             for seed in (0, 1)))
    seeds = {str(n): scores(f"out/tiny_own/seed{n}") for n in (0, 1)}
    summary = scores("out/tiny_own")
    assert summary["seeds"] == seeds
    assert summary["eval_accuracy"] == np.mean([r["eval_accuracy"] for r in seeds.values()])


def assert_same_tuning(run, reference):
    assert_equal_runs(run, reference, 0.0)
    for name in ("eval_results.json", "predictions_dev.tsv"):
        assert Path(run, name).read_text() == Path(reference, name).read_text()


def test_no_death_while_files_are_written_changes_a_run(tuned, monkeypatch):
    """Kill it before each of its renamings in turn, until nothing is left to rename."""
    class Killed(BaseException):
        """Pass through `except Exception`."""

    def killing(*args):
        calls.append(args)
        if len(calls) == at:
            raise Killed
        return replace(*args)

    args, replace = ["--epochs=2", "--train_examples=8"], os.replace
    assert tune(*args, "--out=out/whole") == 0
    monkeypatch.setattr(os, "replace", killing)
    at, done = 0, False
    while not done:
        at, calls = at + 1, []
        try:
            done = tune(*args, "--out=out/run") == 0
        except Killed:
            assert at < 40
    assert at > 4
    assert_same_tuning("out/run/seed0", "out/whole/seed0")
    assert not list(Path("out").rglob(".tmp_*"))


@pytest.mark.parametrize("at", [3, 6])  # within an epoch, and at the end of the first seed
def test_a_signal_saves_and_fine_tuning_goes_on(tuned, capsys, at):
    args = ["--seeds=2", "--train_examples=16"]
    trains_pooler("out/tiny")
    with before_update(at, interrupt(signal.SIGTERM)):
        assert tune(*args) == 128 + signal.SIGTERM
    assert steps_saved("out/tiny_own/seed0") == at and not Path("out/tiny_own/seed1").exists()
    assert f"python finetune.py tune.py {' '.join(args)}" in capsys.readouterr().out
    assert tune(*args) == 0
    assert tune(*args, "--out=out/whole") == 0
    for seed in ("seed0", "seed1"):
        assert_same_tuning(f"out/tiny_own/{seed}", f"out/whole/{seed}")
        ours, theirs = (Run(f"out/{run}/{seed}").settings() for run in ("tiny_own", "whole"))
        assert ours | {"out": "out/whole"} == theirs and theirs["pooler_trained"]


def test_seeds_of_a_folder_have_one_recipe_and_one_start(tuned, capsys):
    """Accept another path to the same weights, but no other weights, settings or data.

    The model may train on meanwhile.
    """
    newest = Run("out/tiny").newest_checkpoint()

    def refused(*args, words):
        assert_one_line(capsys, "tune.py", "--max_steps=2", *args, main=finetune.main, words=words)

    def train_on(_):
        shutil.copytree(newest, newer)
        saved = torch.load(newer / "model.pt", weights_only=True)
        torch.save({**saved, "sha256": "other"}, newer / "model.pt")

    newer = newest.with_name("step_000099")
    with before_update(2, train_on):
        assert tune("--max_steps=2", "--seeds=2", "--out=out/two") == 0
    assert len({seed.settings()["init_sha256"] for seed in Run("out/two").seed_runs()}) == 1
    shutil.rmtree(newer)
    assert tune("--max_steps=2") == 0
    refused("--seed=1", "--lr=2e-3", words=["seed0 was trained with lr = 0.005, not 0.002"])
    shutil.copytree(newest, "out/elsewhere/step_000004")
    shutil.copy("out/tiny/vocab.txt", "out/elsewhere")
    shutil.copy("out/tiny/config.json", "out/elsewhere")
    assert tune("--max_steps=2", "--init_from=out/elsewhere", "--out=out/tiny_own") == 0
    assert tune("--max_steps=2", "--seed=1", "--init_from=./out/tiny", "--log_interval=7") == 0
    assert list(scores("out/tiny_own")["seeds"]) == ["0", "1"]  # of all seeds that are done
    shutil.rmtree("out/tiny")
    assert train("--max_steps=4", "--eval_interval=100", "--seed=1") == 0  # the same path and step
    refused(words=["seed0 started from other weights", "--out=out/NAME"])
    with Path("own/dev.tsv").open("a") as dev:
        dev.write("cat\tanimal\n")
    refused(words=["seed0 was trained on other data", "--out=out/NAME"])


def test_the_weights_become_those_of_transformers(tuned):
    """Train BERT of transformers by hand on the same batches, from the same weights."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=25, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    theirs.save_pretrained("theirs")
    shutil.copy("tiny.txt", "theirs/vocab.txt")
    args = ["--init_from=theirs", "--dropout=0", "--warmup=0", "--max_steps=12", "--lr=5e-3",
            "--weight_decay=0", "--grad_clip=0.5", "--log_interval=1"]
    assert tune(*args, "--out=out/ours") == 0
    ours = load_model("out/ours")

    torch.manual_seed(0)
    start = build_model(ours.bert.config, "classifier", ["animal", "none"])
    init_from(start, "theirs")
    theirs.classifier.load_state_dict(start.head.state_dict())
    config = load_settings(finetune.Settings, ["tune.py", *args])
    examples = load_examples(find_task("own"), "train", text_tokenizer("tiny.txt"), 32, 128)
    batches = finetune.TrainingBatches(examples, config)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=5e-3, eps=1e-6)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
    losses = []
    for step in range(12):
        arrays, _ = batches.get(step, 0)
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        loss = theirs(batch["ids"], batch.get("mask"), batch["token_types"],
                      labels=batch["labels"]).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    logged = [r["loss"] for r in log("out/ours/seed0") if "lr" in r]
    assert logged == pytest.approx(losses, rel=1e-4)
    theirs.save_pretrained("theirs")
    models = start, ours, load_model("theirs")
    for before, mine, other in zip(*(model.parameters() for model in models), strict=True):
        moved = (mine - before).norm()
        assert moved > 0 and (mine - other).norm() < 1e-3 * moved


def test_fine_tuning_says_what_is_longer_than_training(tuned, capsys):
    for max_len, is_longer in ((16, False), (17, True)):
        assert tune("--max_steps=1", f"--max_len={max_len}", f"--out=out/{max_len}") == 0
        assert ("16 tokens that out/tiny" in capsys.readouterr().out) == is_longer
