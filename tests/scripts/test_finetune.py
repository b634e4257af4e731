"""
Fine-tuning: what it leaves, what it learns, and that no kill or signal changes it.
"""
import collections
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import finetune
import measure
from for_transformers.export import export
from lib import predict
from lib.errors import UserError
from lib.files import load_file
from lib.predict import best_spans, predict_examples
from lib.run import Run
from lib.settings import load_settings
from lib.tasks import TASKS, TaskData, TrainingBatches, find_task
from lib.tokenizer import load_tokenizer
from lib.training import Trainer
from lib.weights import find_weights, load_model, read_weights
from model import BertConfig, Classifier, SpanReader
from tests.helpers import KILLS, ROOT, assert_one_line, assert_same, files, log, steps_saved, tune


def scores(run):
    return json.loads(Path(run, "eval_results.json").read_text())


def own_data(task, max_len=32, stride=128):
    """The TaskData of a task in the working directory."""
    tokenizer = load_tokenizer(Path("out/tiny/vocab.txt"))
    return TaskData(find_task(task), tokenizer, max_len, stride)


def test_a_fine_tuned_run_leaves_what_it_promises(tuned, capsys):
    assert tune("--seeds=3", "--out=out/run") == 0
    run = Path("out/run/seed1")
    assert sorted(p.name for p in run.iterdir()) == [
        "best", "config.json", "eval_results.json", "log.jsonl", "predictions_dev.tsv",
        "step_000075", "submission", "vocab.txt"]
    each = [scores(f"out/run/seed{n}") for n in range(3)]
    assert len({str(result) for result in each}) > 1  # seeds matter
    for seed, result in enumerate(each):
        evaluations = {r["epoch"]: r["accuracy"] for r in log(f"out/run/seed{seed}")
                       if "accuracy" in r}
        assert list(evaluations) == [1, 2, 3]
        assert result["eval_accuracy"] == max(evaluations.values())
        assert result["eval_epoch"] == max(evaluations, key=evaluations.get)
        assert (result["last_epoch"], result["last_accuracy"]) == (3, evaluations[3])
    summary = scores("out/run")
    assert summary["eval_accuracy"] == sorted(r["eval_accuracy"] for r in each)[1] > 0.7
    assert list(summary["seeds"].values()) == each
    said = capsys.readouterr().out
    assert "median of 3: accuracy" in said
    gold = [line.split("\t")[1] for line in Path("own/dev.tsv").read_text().splitlines()[1:]]
    shares = [f"{label} {gold.count(label) / 30:.1%}" for label in ("animal", "none")]
    assert re.search(rf"own/dev.tsv: 30 examples, .* tokens each, {', '.join(shares)}\n", said)
    lines = Path(run, "predictions_dev.tsv").read_text().splitlines()
    found = [line.split("\t") for line in lines[1:]]
    assert lines[0] == "index\tsentence\tlabel\tprediction\tprobability"
    assert [row[0] for row in found] == [str(n) for n in range(30)]
    right = [row[3] == label for row, label in zip(found, gold, strict=True)]
    assert np.mean(right) == each[1]["eval_accuracy"]
    submitted = Path(run, "submission/own.tsv").read_text().splitlines()
    assert len(submitted) == 8 and {line.split("\t")[1] for line in submitted[1:]} <= {
        "animal", "none"}
    saved = torch.load(run / "step_000075/model.pt", weights_only=True)
    assert saved["head"] == "classifier" and saved["labels"] == ["animal", "none"]
    assert type(load_model(run / "best")) is Classifier
    assert saved["config"]["memory_layers"] == (2, 3)

    before = files()
    assert tune("--seeds=3", "--out=out/run") == 0 and files() == before  # it was done


def test_the_best_epoch_counts(tuned, monkeypatch):
    """The first of equal epochs is the best; nan is worse than any number."""
    values = iter([math.nan, 0.5, 0.7, 0.7, 0.6])
    score_dev, predict_examples = finetune.score_dev, predict.predict_examples
    used, weights = [], []

    def fake(*args):
        score_dev(*args)
        weights.append(used[-1])
        return {"accuracy": next(values)}

    def recording(model, *args):
        used.append(model.head.weight.detach().clone())
        return predict_examples(model, *args)

    monkeypatch.setattr(finetune, "score_dev", fake)
    monkeypatch.setattr(predict, "predict_examples", recording)
    assert tune("--epochs=5", "--train_examples=16", "--out=out/run") == 0
    assert scores("out/run/seed0")["eval_epoch"] == 3 and len(weights) == 5
    saved = read_weights("out/run/seed0/best")["weights"]["head.weight"]
    assert torch.equal(saved, weights[2]) and not torch.equal(saved, weights[4])
    assert len(used) == 7 and torch.equal(used[5], saved) and torch.equal(used[6], saved)


def test_the_weights_that_were_scored_exist_whenever_it_is_killed(tuned, monkeypatch):
    """Killed before each of its renamings in turn. A second time the same epoch has another score,
    as on a device whose arithmetic is not exact."""
    scored, used, rng, calls = {}, [], random.Random(0), []
    score_dev, predict_examples = finetune.score_dev, predict.predict_examples

    class Killed(BaseException):
        pass

    def recording(model, *args):
        used[:] = [model.head.weight.detach().clone()]
        return predict_examples(model, *args)

    def fake(*args):
        score_dev(*args)
        score = rng.random()
        scored[score] = used[0]
        return {"accuracy": score}

    def killing(rename):
        def before(*args, **kwargs):
            calls.append(args)
            if len(calls) == at:
                raise Killed
            return rename(*args, **kwargs)
        return before

    def best_weights(score):
        folder, _ = find_weights("out/run/seed0")
        assert folder.name.startswith("best")
        found = read_weights(folder)["weights"]["head.weight"]
        assert torch.equal(found, scored[score])

    monkeypatch.setattr(predict, "predict_examples", recording)
    monkeypatch.setattr(finetune, "score_dev", fake)
    monkeypatch.setattr(os, "replace", killing(os.replace))
    monkeypatch.setattr(Path, "rename", killing(Path.rename))
    at, ends = 0, []
    while ends != [0]:
        at, ends = at + 1, []
        calls.clear()
        try:
            ends.append(tune("--epochs=3", "--train_examples=8", "--out=out/run"))
        except Killed:
            pass
        newest = Run("out/run/seed0").newest_checkpoint()
        if newest and not ends:
            best = load_file(newest / "state.pt")["best"]
            named = [Path("out/run/seed0", name) for name in
                     (f"best_epoch_{best['epoch']:g}", "best")]
            folder = next(path for path in named if path.exists())
            found = read_weights(folder)["weights"]["head.weight"]
            assert torch.equal(found, scored[best["accuracy"]])
    assert at > 8 and len(scored) > 4
    best_weights(load_file(newest / "state.pt")["best"]["accuracy"])
    assert [path.name for path in Path("out/run/seed0").glob("best*")] == ["best"]


def test_one_path_is_one_folder_of_weights(tuned, capsys):
    """For whatever reads weights: of a fine-tuned run its first seed's best epoch."""
    pytest.importorskip("safetensors")
    assert tune("--seeds=2", "--out=out/run", "--epochs=1", "--train_examples=16") == 0
    shutil.copytree("out/run/seed1", "out/run/seed10")
    best = Path("out/run/seed0/best")
    model = torch.load(best / "model.pt", weights_only=True)
    model["weights"]["head.bias"] += 1  # so that the last epoch has others
    torch.save(model, best / "model.pt")
    for n, path in enumerate(("out/run", "out/run/seed0", "out/run/seed0/best")):
        assert find_weights(path) == (best, best.parent / "vocab.txt")
        assert_same(dict(load_model(path).state_dict()), model["weights"])
        capsys.readouterr()
        export(path, f"exported{n}")
        assert f"weights of {best}" in capsys.readouterr().out
        assert_same(read_weights(f"exported{n}")["weights"], model["weights"])
        assert tune(f"--init_from={path}", "--max_steps=1", "--out=out/again") == 0
        assert f"init_from {best}:" in capsys.readouterr().out
        shutil.rmtree("out/again")
        if n < 2:
            measure.main(["table", path])
            assert f"weights of {best}" in capsys.readouterr().out
    last = Path("out/run/seed0/step_000002")
    assert find_weights(last) == (last, best.parent / "vocab.txt")
    assert find_weights("out/run/seed1")[0] == Path("out/run/seed1/best")
    assert tune("--init_from=out/run", "--max_steps=1") == 0
    assert Path("out/run_own/seed0").is_dir()  # named after the run, not after its seed


def test_settings_of_fine_tuning_are_used(tuned, capsys):
    """A paragraph of 36 tokens has 4 windows of 18 that begin 8 apart. SQuAD's scores are percent
    already."""
    args = ["--max_len=24", "--doc_stride=8", "--seed=3", "--seeds=2", "--dropout=0.3"]
    assert tune("--task=squad", "--max_steps=1", "--out=out/run", *args) == 0
    said = capsys.readouterr().out
    assert "train-v1.1.json: 8 examples" in said  # of two questions
    medians = scores("out/run")
    assert list(medians["seeds"]) == ["3", "4"] and Path("out/run/seed4").is_dir()
    assert (f"median of 2: f1 {medians['eval_f1']:.2f}, "
            f"exact_match {medians['eval_exact_match']:.2f};") in said
    assert load_model("out/run/seed3/step_000001").bert.config.dropout == 0.3


def test_the_first_metric_picks_the_best_epoch(tuned, monkeypatch):
    results = iter([{"pearson": 0.5, "spearmanr": 0.9}, {"pearson": 0.7, "spearmanr": 0.1}])
    monkeypatch.setattr(finetune, "score_dev", lambda *more: next(results))
    assert tune("--task=pairs", "--epochs=2", "--train_examples=8", "--out=out/run") == 0
    found = scores("out/run/seed0")
    assert (found["eval_epoch"], found["eval_pearson"], found["eval_spearmanr"]) == (2, 0.7, 0.1)


def test_a_seed_draws_its_own_head(tuned, monkeypatch):
    heads, train_epochs = [], finetune.train_epochs

    def seen(trainer, *more):
        heads.append(trainer.model.head.weight.detach().clone())
        return train_epochs(trainer, *more)

    monkeypatch.setattr(finetune, "train_epochs", seen)
    assert tune("--seeds=2", "--max_steps=1") == tune("--max_steps=1", "--out=out/again") == 0
    assert torch.equal(heads[0], heads[2]) and not torch.equal(heads[0], heads[1])


def test_the_initial_weights_are_read_once_more_a_seed(tuned, monkeypatch):
    reads, read = [], read_weights
    monkeypatch.setattr("lib.weights.read_weights",
                        lambda path: reads.append(str(path)) or read(path))
    assert tune("--max_steps=1", "--seeds=2") == 0
    assert sum("tiny_own" not in path for path in reads) == 3


def test_warmup_is_a_share_of_the_steps(tuned):
    assert tune("--max_steps=8", "--warmup=0.5", "--log_interval=1") == 0
    found = [r["lr"] for r in log("out/tiny_own/seed0") if "grad_norm" in r]
    assert found == pytest.approx([5e-3 * min((n + 1) / 4, (8 - n) / 4) for n in range(8)])


def test_the_order_is_a_function_of_seed_and_epoch(tuned):
    """Every epoch has every example once."""
    def epoch(seed, number):
        batches = TrainingBatches(train, finetune.Config(seed=seed, batch_size=8))
        steps = range(number * 25, (number + 1) * 25)
        return [tuple(row) for step in steps for row in batches.get(step)["ids"].tolist()]

    train = own_data("own").train
    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert len({str(order) for order in orders}) == 4 and epoch(1, 1) == orders[3]

    def texts(order):
        return collections.Counter(tuple(filter(None, row)) for row in order)

    assert all(texts(order) == texts(orders[0]) for order in orders)
    assert texts(orders[0]).total() == 200


def test_regression_and_frozen_values(tuned):
    """A score's column makes a regression; update_memory = False keeps the value tables."""
    with Path("pairs/dev.tsv").open("a") as dev:
        dev.write("the .\tthe .\t2.4\n")
    for update in (True, False):
        assert tune("--task=pairs", f"--update_memory={update}") == 0
        run = Path(f"out/tiny_pairs{'' if update else '_fixed'}/seed0")
        weights = [torch.load(path / "model.pt", weights_only=True)["weights"] for path in
                   (Path("out/tiny/step_000004"), run / "step_000075")]
        for name in weights[0].keys() & weights[1].keys():
            same = torch.equal(weights[0][name], weights[1][name])
            assert same == ("values" in name and not update), name
    result = scores(run)
    assert result["eval_pearson"] > 0.2 and -1 <= result["eval_spearmanr"] <= 1
    assert torch.load(run / "best/model.pt", weights_only=True)["labels"] == []
    said = (run / "predictions_dev.tsv").read_text().splitlines()
    assert said[-1].split("\t")[3] == "2.4"  # not float32's neighbour of it


def test_submitted_scores_are_possible_ones(tuned, monkeypatch):
    """Inside the range of the training data's, whatever the model says."""
    def column(path):
        lines = Path("out/tiny_pairs/seed0", path).read_text().splitlines()[1:]
        return [float(line.split("\t")[-1]) for line in lines]

    monkeypatch.setattr(predict, "predict_examples",
                        lambda model, examples, *_: np.linspace(-99, 99,
                                                                len(examples.ids))[:, None])
    assert tune("--task=pairs", "--max_steps=1") == 0
    assert (min(column("predictions_dev.tsv")), max(column("predictions_dev.tsv"))) == (-99, 99)
    found = column("submission/pairs.tsv")
    assert len(found) == 7 and (min(found), max(found)) == (0, 3)


def best_span_by_hand(logits, starts, first, length, n=20, longest=30):
    """All pairs of one window, one by one."""
    starts, ends = (sorted(positions, key=lambda i: -logits[i, k])[:n]
                    for k, positions in enumerate((range(*starts), range(first, length - 1))))
    pairs = [(float(logits[s, 0] + logits[e, 1]), s, e) for s in starts for e in ends
             if 0 <= e - s < longest]
    return max(pairs, default=(-math.inf, 0, 0))


@pytest.mark.parametrize("n, longest", [(20, 30), (3, 30), (5, 2), (1, 1)])
def test_best_spans(n, longest):
    torch.manual_seed(n)
    lengths, first = np.array([40, 31, 12, 7, 6]), np.array([5, 3, 9, 5, 5])  # the last: empty
    starts = np.array([[5, 39], [7, 29], [9, 10], [6, 6], [5, 5]])  # the fourth: none is its own
    logits = torch.randn(5, 40, 2, dtype=torch.float64)
    logits[0, 2] = logits[1, 30] = logits[2, 20] = 99  # in the question, its [SEP], the padding
    found = best_spans(logits, starts, first, lengths - 1, n, longest)
    for row in range(5):
        score, *span = best_span_by_hand(logits[row], starts[row], first[row], lengths[row], n,
                                         longest)
        assert found[row, 0].item() == pytest.approx(score)
        assert found[row, 1:].tolist() == span or score == -math.inf
    assert found[3, 0] == found[4, 0] == -math.inf


def test_an_answer_has_at_most_30_tokens():
    logits = torch.zeros(1, 60, 2)
    logits[0, 5, 0] = logits[0, 35, 1] = 9  # 31 tokens
    logits[0, 34, 1] = 8
    found = best_spans(logits, np.array([[3, 59]]), np.array([3]), np.array([59]))
    assert found.tolist() == [[17, 5, 34]]


def test_the_20_best_starts_are_tried():
    """Nineteen starts with higher logits are too far from the end."""
    logits = torch.zeros(1, 80, 2)
    logits[0, 3:22, 0] = torch.arange(40, 21, -1.0)
    logits[0, 50, 0], logits[0, 70, 1] = 9, 90
    found = best_spans(logits, np.array([[3, 79]]), np.array([3]), np.array([79]))
    assert found[:, 1:].tolist() == [[50, 70]]


def test_predictions_are_without_dropout(tuned):
    sizes = load_file(Path("out/tiny/step_000004/model.pt"))["config"]
    model = Classifier(BertConfig(**{**sizes, "dropout": 0.5}), 1).train()
    dev = own_data("pairs").dev[""]
    first, second = (predict_examples(model, dev, 8) for _ in range(2))
    assert len(set(first[:, 0])) > 1 and (first == second).all() and model.training


def test_squad_is_learned_by_heart(tuned):
    """Two questions with the same answer, in windows."""
    args = ["--task=squad", "--max_len=24", "--doc_stride=8", "--dropout=0", "--max_steps=60"]
    assert tune(*args) == 0
    result, run = scores("out/tiny_squad/seed0"), Path("out/tiny_squad/seed0")
    assert (result["eval_f1"], result["eval_exact_match"]) == (100, 100)
    assert json.loads((run / "predictions_dev.json").read_text()) == {"q0": "cat", "q1": "cat"}
    assert torch.load(run / "best/model.pt", weights_only=True)["head"] == "span"
    assert type(load_model(run / "best")) is SpanReader


def test_a_submission_has_the_indices_of_its_file(tuned):
    lines = Path("own/test.tsv").read_text().splitlines()[1:]
    lines[2] = ""  # an empty sentence
    rows = [f"{90 - n}\t{line}\n" for n, line in enumerate(lines)]
    Path("own/test.tsv").write_text("".join(["index\tsentence\n", *rows]))
    assert tune("--max_steps=1") == 0
    found = Path("out/tiny_own/seed0/submission/own.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in found] == ["index", *map(str, range(90, 83, -1))]


def test_padding_changes_no_prediction_and_no_loss(tuned):
    """The losses and gradients of a training step stay the same, too."""
    train = own_data("squad", max_len=23, stride=8).train
    sizes = load_file(Path("out/tiny/step_000004/model.pt"))["config"]
    lengths = train.lengths
    index = np.array([0, len(lengths) // 2 - 1])  # the first window, and a short one
    assert len(set(lengths[index])) == 2
    results = []
    for pad_id, device, multiple in ((0, "cpu", 1), (9, "cuda", 8)):
        torch.manual_seed(0)
        model = SpanReader(BertConfig(**{**sizes, "dropout": 0.0})).double()
        train.pad_id = pad_id
        batch = {**train.pad(index, device), "labels": train.labels[index]}
        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        assert batch["ids"].shape[1] % multiple == 0
        model(**batch).backward()
        del batch["labels"]
        logits = model(**batch).detach()
        results.append([logits[0, :lengths[index[0]]], logits[1, :lengths[index[1]]],
                        *(p.grad for p in model.parameters() if p.grad is not None)])
    assert batch["ids"].shape[1] > lengths[0] and (batch["ids"] == 9).any()
    assert len(results[0]) == len(results[1]) > 20
    for ours, padded in zip(*results, strict=True):
        torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-6)  # the loss is in float32


def test_bfloat16_fine_tuning(tuned):
    """Another program, nearly the same losses."""
    found = []
    for dtype in ("float32", "bfloat16"):
        assert tune("--dropout=0", "--epochs=1", f"--out=out/{dtype}", f"--dtype={dtype}") == 0
        found.append([r["loss"] for r in log(f"out/{dtype}/seed0") if "loss" in r])
    assert found[0] == pytest.approx(found[1], abs=0.05) and found[0] != found[1]


def assert_same_tuning(run, reference):
    def timeless(path):
        return [{k: v for k, v in r.items() if k not in ("examples_per_s", "elapsed")}
                for r in log(path)]

    assert_same(timeless(run), timeless(reference), "log")
    assert scores(run) == scores(reference)
    ours, theirs = (Path(path, "predictions_dev.tsv").read_bytes() for path in (run, reference))
    assert ours == theirs
    for name in (f"{Run(reference).newest_checkpoint().name}/{part}.pt" for part in
                 ("model", "optimizer")):
        assert_same(*(torch.load(Path(p, name), weights_only=True) for p in (run, reference)), name)


def test_a_killed_fine_tuning_ends_as_if_it_had_not_been(tuned):
    """SIGKILL at random moments: in steps, in evaluations, while something is written."""
    args = ["--epochs=8", "--checkpoint_interval=2", "--train_examples=64"]
    assert tune(*args, "--out=out/whole") == 0
    rng, kills = random.Random(), 0
    while not Path("out/killed/seed0/eval_results.json").exists() and kills < KILLS / 2:
        before = steps_saved("out/killed/seed0")
        with subprocess.Popen([sys.executable, str(ROOT / "finetune.py"), "tune.py", *args,
                               "--out=out/killed"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as process:
            while process.poll() is None and steps_saved("out/killed/seed0") == before:
                time.sleep(0.002)
            time.sleep(rng.random() * 0.15)
            process.kill()
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        kills += 1
    assert kills > 1
    assert tune(*args, "--out=out/killed") == 0
    assert_same_tuning("out/killed/seed0", "out/whole/seed0")
    assert not list(Path("out/killed").rglob(".tmp_*"))


@pytest.mark.parametrize("at", [1, 8, 24])  # the end of an epoch, and of the first seed
def test_a_signal_saves_and_fine_tuning_goes_on(tuned, monkeypatch, capsys, at):
    step, args = finetune.Trainer.step, ["--seeds=2", "--train_examples=64"]

    def interrupted(trainer, n):
        if n == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, n)

    with monkeypatch.context() as patch:
        patch.setattr(finetune.Trainer, "step", interrupted)
        assert tune(*args) == 128 + signal.SIGTERM
    assert steps_saved("out/tiny_own/seed0") == at and not Path("out/tiny_own/seed1").exists()
    assert f"python finetune.py tune.py {' '.join(args)}" in capsys.readouterr().out
    assert tune(*args) == 0
    assert tune(*args, "--out=out/whole") == 0
    for seed in ("seed0", "seed1"):
        assert_same_tuning(f"out/tiny_own/{seed}", f"out/whole/{seed}")


def test_damaged_scores_are_named(tuned):
    pytest.importorskip("safetensors")
    assert tune("--max_steps=1") == 0
    for text in ("{", "[1]"):
        Path("out/tiny_own/seed0/eval_results.json").write_text(text)
        for run in (lambda: tune("--max_steps=1"), lambda: measure.main(["glue", "out/tiny_own"]),
                    lambda: export("out/tiny_own", "exported")):
            with pytest.raises(UserError, match="seed0/eval_results.json: not readable"):
                run()


def test_other_settings_are_another_fine_tuning(tuned):
    assert tune("--max_steps=2") == 0
    with pytest.raises(UserError, match="lr = 0.005, not 0.002"):
        tune("--max_steps=2", "--lr=2e-3")


def test_a_median_is_over_seeds_of_one_model(tuned, capsys):
    """Pretraining went on between the first seed and the second."""
    newest = Run("out/tiny").newest_checkpoint()
    assert tune("--max_steps=2") == 0
    shutil.copytree(newest, "out/tiny/step_999999")
    assert tune("--max_steps=2") == 0  # it is done
    assert_one_line(capsys, "tune.py", "--max_steps=2", "--seeds=2", main=finetune.main, words=[
        f"out/tiny_own/seed0 was trained with init_checkpoint = {newest}, ",
        "not out/tiny/step_999999: give seed1 its own --out=out/NAME"])
    shutil.rmtree("out/tiny/step_999999")
    assert_one_line(capsys, "tune.py", "--max_steps=2", "--seed=1", "--lr=2e-3",
                    main=finetune.main, words=["seed0 was trained with lr = 0.005, not 0.002"])
    assert not Path("out/tiny_own/seed1/config.json").exists()
    # other paths to the same weights, and settings that change no score, are no difference
    assert tune("--max_steps=2", "--seed=1", "--init_from=./out/tiny", "--log_interval=7") == 0
    assert tune("--max_steps=2") == 0
    assert list(scores("out/tiny_own")["seeds"]) == ["0", "1"]  # of all seeds that are done
    other = Path("out/tiny_own/seed1/config.json")
    other.write_text(json.dumps(json.loads(other.read_text()) | {"lr": 0.5}))
    assert_one_line(capsys, "tune.py", "--max_steps=2", main=finetune.main,
                    words=["seed1 was trained with lr = 0.5, not 0.005: give seed0"])
    with Path("own/dev.tsv").open("a") as dev:
        dev.write("a dog\tanimal\n")
    assert_one_line(capsys, "tune.py", "--max_steps=2", "--seed=2", main=finetune.main,
                    words=["seed0 was trained with other texts or labels of the task"])


def test_a_resumed_fine_tuning_has_the_same_data(tuned, capsys):
    """The same number of classes under other names, or another text in dev, is another task."""
    assert tune("--max_steps=2", "--train_examples=16") == 0
    saved = Run("out/tiny_own/seed0").settings()["data"]
    assert saved == {"labels": ["animal", "none"], **{
        f"{split}.tsv": hashlib.sha256(Path(f"own/{split}.tsv").read_bytes()).hexdigest()
        for split in ("train", "dev")}}
    for split, names in {"[td]*": ("none", "plant"), "dev": ("cat", "dog")}.items():
        before = {path: path.read_text() for path in Path("own").glob(f"{split}.tsv")}
        for path, text in before.items():
            path.write_text(text.replace(*names))
        assert_one_line(capsys, "tune.py", "--max_steps=2", "--train_examples=16",
                        main=finetune.main, words=["out/tiny_own/seed0 was trained on other data: ",
                                                   "--out=out/NAME"])
        for path, text in before.items():
            path.write_text(text)
    assert tune("--max_steps=2", "--train_examples=16") == 0


def test_a_warm_up_is_at_most_the_whole_run(tuned, capsys):
    assert_one_line(capsys, "tune.py", "--warmup=6", main=finetune.main,
                    words=["warmup = 6.0: expected a share of the steps, 0 to 1"])


def test_what_identifies_a_task(tmp_path):
    """MRPC's dev split is a list of ids beside its texts."""
    task = dataclasses.replace(TASKS["mrpc"], name="mrpc", folder=tmp_path)
    for name in task.archives:
        (tmp_path / name).write_text(name)
    known = finetune.identify_data(task)
    assert known.keys() >= {"msr_paraphrase_train.txt", "mrpc_dev_ids.tsv", "labels"}
    (tmp_path / "mrpc_dev_ids.tsv").write_text("others")
    assert finetune.identify_data(task) != known
    squad = dataclasses.replace(TASKS["squad"], name="squad", folder=tmp_path)
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").touch()
    assert finetune.identify_data(squad).keys() == {"train-v1.1.json", "dev-v1.1.json", "labels"}


def test_the_weights_become_those_of_transformers_trainer(tuned):
    """Both start from the same weights and see the same batches, without dropout. The warm-up is
    off, as theirs begins at 0. After 12 steps embeddings, layers, pooler and head are the same."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from results import trainer as peer
    config = load_settings(finetune.Config, [
        "tune.py", "--init_from=theirs", "--dropout=0", "--warmup=0", "--max_steps=12",
        "--weight_decay=0.5", "--grad_clip=0.5", "--device=cpu", "--dtype=float32"])
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=len(Path("tiny.txt").read_text().split()), hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0))
    theirs.save_pretrained("theirs")
    shutil.copy("tiny.txt", "theirs/vocab.txt")
    ours = load_model("theirs").train()
    data = TaskData(find_task("own"), load_tokenizer("theirs/vocab.txt"), config.max_len, 128)
    examples = TrainingBatches(data.train, config)
    trainer = Trainer(config, ours, examples, torch.device("cpu"), torch.float32)
    first = [p.clone() for p in ours.parameters()]
    for step in range(12):
        trainer.step(step)
    peer.train(theirs, examples, config, "out/theirs")
    theirs.save_pretrained("theirs")
    again = load_model("theirs")
    for before, mine, other in zip(first, ours.parameters(), again.parameters(), strict=True):
        moved = (mine - before).norm()
        assert moved > 0 and (mine - other).norm() < 1e-3 * moved
