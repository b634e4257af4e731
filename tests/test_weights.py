"""
Find weights and load them.
"""
import dataclasses
import math
from pathlib import Path

import pytest
import torch

import pretrain
from lib.run import Run
from lib.settings import UserError
from lib.weights import (
    check_sizes,
    find_weights,
    init_from,
    load_model,
    median_seed,
    memory_settings,
    model_file,
    read_weights,
)
from model import BertConfig, Classifier, SpanReader
from tests.helpers import (
    TINY,
    assert_one_line,
    assert_same,
    save_model,
    tiny_bert,
    train,
    write_settings,
)


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


@pytest.mark.parametrize("name", ["bert-base-uncase", "out/run", "vocab.txt"])
def test_weights_that_are_not_there(workdir, name):
    Path("out/run").mkdir(parents=True)
    with pytest.raises(UserError, match=f"^{name} has no checkpoint, .*pytorch_model.bin: "):
        find_weights(name)
    Path("out/run/pytorch_model.bin").touch()
    with pytest.raises(UserError, match="^out/run/config.json"):
        read_weights("out/run")


def test_a_memory_keeps_its_settings(place, capsys):
    """Inherit what is not given, refuse what differs, and go on as it began."""
    memory = {key: TINY[key] for key in ("memory_layers", "n_keys", "memory_heads", "topk",
                                         "key_dim")}
    lines = [line for line in Path("tiny.py").read_text().splitlines()
             if line.split()[0] not in memory]
    Path("silent.py").write_text("\n".join(lines))
    assert train("--max_steps=1", "--alpha=0") == 0
    args = ["silent.py", "--init_from=out/tiny", "--out=out/more", "--max_steps=1", "--beta=0.5"]
    for words in (["--key_dim=256", "key_dim = 16, not 256", "leave them out"],  # the default
                  ["--init_values=zero", "init_values = zero"]):
        assert_one_line(capsys, *args, words[0], words=words[1:])
    assert pretrain.main(args) == 0
    expected = memory | {"memory_layers": [2, 3], "alpha": 0, "beta": 0.5}
    settings = Run("out/more").settings()
    assert {key: settings[key] for key in expected} == expected
    assert load_model("out/more").bert.config.topk == 4
    assert pretrain.main([*args, "--max_steps=2"]) == 0  # goes on
    assert_one_line(capsys, *args[:-1], words=["was trained with beta = 0.5, not 1.0"])
    assert_one_line(capsys, *args, "--topk=2", words=["was trained with topk = 4, not 2"])


def test_a_new_setting_of_a_memory_is_compared():
    kind = dataclasses.make_dataclass("Gated", [("gate", bool, False)], bases=(BertConfig,))
    gated = kind(memory_layers=(4,), gate=True)
    assert memory_settings(gated)["gate"]
    with pytest.raises(UserError, match="x has gate = True, not False: "):
        check_sizes("x", gated, kind(memory_layers=(4,)))
