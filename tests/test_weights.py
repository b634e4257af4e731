"""
Find weights and load them.
"""
from pathlib import Path

import pytest
import torch

from lib.settings import UserError
from lib.slots import load_with_tokenizer
from lib.weights import (
    find_weights,
    init_from,
    load_model,
    model_file,
    read_weights,
)
from model import Classifier, SpanReader
from tests.helpers import assert_same, save_model, tiny_bert, train


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
    ({"n_keys": 5}, r"size mismatch for bert\.layers\.1\.memory"),
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
