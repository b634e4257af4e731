"""
Find weights and load them.
"""
import math
from pathlib import Path

import pytest
import torch

import measure
from lib.run import Run
from lib.settings import UserError
from lib.slots import load_with_tokenizer
from lib.weights import (
    find_weights,
    init_from,
    load_model,
    median_seed,
    model_file,
    read_weights,
)
from model import Classifier, SpanReader
from tests.helpers import assert_same, save_model, tiny_bert, train, tune, write_settings


@pytest.mark.parametrize("kind, labels", [("lm", ()), ("classifier", ("a", "b")),
                                          ("classifier", ()), ("span", ())])
def test_a_model_comes_back_from_its_checkpoint(tmp_path, kind, labels):
    """Save and load each kind. A regression is a classifier without labels."""
    config = tiny_bert(memory_layers=(2,)).bert.config
    model = {"lm": lambda: tiny_bert(seed=1, memory_layers=(2,)),
             "classifier": lambda: Classifier(config, len(labels) or 1),
             "span": lambda: SpanReader(config)}[kind]()
    folder = save_model(tmp_path / "run", model, labels)
    loaded = load_model(tmp_path / "run")
    assert type(loaded) is type(model) and loaded.bert.config == config
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert find_weights(tmp_path / "run") == (folder, tmp_path / "run/vocab.txt")
    saved = read_weights(folder)
    assert saved.get("labels", []) == list(labels)
    assert ("labels" in saved) == (kind == "classifier") == ("labels" in model_file(model, labels))


def test_changing_a_model_does_not_change_its_file(tmp_path):
    save_model(tmp_path, tiny_bert())
    with torch.no_grad():
        for p in load_model(tmp_path).parameters():
            p.zero_()
    assert load_model(tmp_path).bert.words.weight.abs().sum() > 0


def test_a_setting_that_an_old_model_lacks_is_its_default(tmp_path):
    path = save_model(tmp_path, tiny_bert(alpha=1.0)) / "model.pt"
    saved = torch.load(path)
    del saved["config"]["alpha"]
    torch.save(saved, path)
    assert load_model(tmp_path).bert.config.alpha == 1.0


@pytest.mark.parametrize("scores, median", [
    ([5, 9, 7], 2), ([5, 9, 7, 6], 3),
    ([math.nan, 1, 2, 3], 2), ([math.nan], 0), ([3], 0)])
@pytest.mark.parametrize("metric, other", [("accuracy", "f1"), ("f1", "exact_match")])
def test_the_median_seed(tmp_path, metric, other, scores, median):
    """Take the lower of two in the middle. Seeds that are not done, or of nan, do not count."""
    for seed in range(5):
        run = Run(tmp_path / f"seed{seed}")
        write_settings(run.folder, task="own")
        if seed < len(scores):
            run.write_results({"metric": metric, f"eval_{other}": -seed,
                               f"eval_{metric}": scores[seed]})
    assert median_seed(tmp_path).folder == tmp_path / f"seed{median}"
    assert median_seed(tmp_path / "seed0").folder == tmp_path / "seed0"
    save_model(tmp_path, tiny_bert())  # a run with weights of its own is no other
    assert median_seed(tmp_path).folder == tmp_path


def test_the_median_seed_predicts(tuned, capsys):
    tune("--epochs=1", "--seeds=3", "--train_examples=40")
    seeds = Run("out/tiny_own").seed_runs()
    _, seed, _ = sorted(seeds, key=lambda run: run.results()["eval_accuracy"])
    Path("new.tsv").write_text("sentence\nthe cat\nthe old one saw\n")
    tables = []
    for run in ("out/tiny_own", str(seed.folder)):
        capsys.readouterr()
        measure.main(["predict", run, "new.tsv", "--device=cpu"])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_a_run_for_a_notebook(place):
    assert train("--max_steps=2", "--eval_interval=100") == 0
    model, tokenizer = load_with_tokenizer("out/tiny")
    encoded = tokenizer.encode("the [MASK] cat")
    assert encoded.tokens == ["[CLS]", "the", "[MASK]", "cat", "[SEP]"]
    assert not model.training and model(torch.tensor([encoded.ids])).shape == (1, 5, 25)


@pytest.mark.parametrize("change, words", [
    ({"d_model": 16, "n_layer": 2, "max_len": 9},
     "n_layer = 3, not 2; d_model = 8, not 16; max_len = 16, not 9"),
    ({"vocab_size": 41}, "size mismatch for"),
    ({"n_keys": 5}, "n_keys = 4, not 5"),
    ({"n_head": 1}, "n_head = 2, not 1"),
    ({"causal": True}, "a masked language model")])
def test_weights_of_other_sizes_are_no_start(tmp_path, change, words):
    save_model(tmp_path / "run", tiny_bert(memory_layers=(2,)))
    with pytest.raises(UserError, match=words) as error:
        init_from(tiny_bert(**{"memory_layers": (2,), **change}), tmp_path / "run")
    assert str(tmp_path / "run/step_000003") in str(error.value)


@pytest.mark.parametrize("name, words", [
    ("out/demo", "pretrain.py configs/demo.py"),
    ("bert-base-uncased", "prepare_data.py weights bert-base-uncased"),
    ("out/none", "out/none"),
    ("file", "file")])
def test_weights_that_are_not_there(workdir, name, words):
    Path("file").touch()
    with pytest.raises(UserError, match=words):
        find_weights(name)
