"""
Checkpoints that lie: one line that names the file, whoever reads it.
"""
import math
import shutil
from pathlib import Path

import pytest
import torch

from lib.errors import UserError
from lib.run import Run
from lib.weights import init_from, load_model, read_weights
from model import Classifier
from tests.helpers import save_model, tiny_bert, train


def without(name):
    return lambda saved: saved["weights"].pop(name)


LIES = {
    "a key more": (lambda saved: saved["weights"].update({"bert.more": torch.ones(3)}),
                   "an unknown bert.more"),
    "a key less": (without("bert.words.weight"), "it has no bert.words.weight"),
    "a number as key": (lambda saved: saved["weights"].update({5: torch.ones(3)}), "no dict of"),
    "weights None": (lambda saved: saved.update(weights=None), "no dict of names and tensors"),
    "a weight None": (lambda saved: saved["weights"].update({"bias": None}), "no dict of"),
    "a sparse weight": (lambda saved: saved["weights"].update(bias=torch.ones(3).to_sparse()),
                        "no dict of"),
    "another head": (lambda saved: saved.update(head="tail"), "head = 'tail': expected classifier"),
    "a list as head": (lambda saved: saved.update(head=[]), r"head = \[\]"),
    "labels 5": (lambda saved: saved.update(labels=5), "labels = 5: expected a list"),
    "labels of numbers": (lambda saved: saved.update(labels=[1]), r"labels = \[1\]"),
    "a config that is no dict": (lambda saved: saved.update(config="base"), "expected a model's"),
    "a size as text": (lambda saved: saved["config"].update(n_layer="3"), "n_layer = '3'"),
    "no memory in its config": (lambda saved: saved["config"].update(memory_layers=()),
                                "an unknown bert.layers.1.memory"),
    "another shape": (lambda saved: saved["weights"].update(bias=torch.ones(3)), "has shape"),
    "nan": (lambda saved: saved["weights"]["bert.norm.weight"][3:].fill_(math.nan),
            "bert.norm.weight has numbers that are not finite: use an older checkpoint"),
    "infinity": (lambda saved: saved["weights"]["bert.norm.bias"][:1].fill_(-math.inf), "finite"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_checkpoint_that_lies_is_named(tmp_path, lie):
    change, words = LIES[lie]
    model = tiny_bert(memory_layers=(2,))
    folder = save_model(tmp_path / "run", model)
    saved = torch.load(folder / "model.pt", weights_only=True)
    change(saved)
    torch.save(saved, folder / "model.pt")
    for read in (lambda: load_model(folder), lambda: init_from(model, folder)):
        with pytest.raises(UserError, match=words) as error:
            read()
        assert str(folder) in str(error.value)


def test_a_classifier_has_its_labels(tmp_path):
    folder = save_model(tmp_path, Classifier(tiny_bert().bert.config, 2), ["a", "b"])
    assert read_weights(folder)["labels"] == ["a", "b"]
    saved = torch.load(folder / "model.pt", weights_only=True)
    torch.save({**saved, "labels": ["a", "b", "c"]}, folder / "model.pt")
    with pytest.raises(UserError, match="shape"):
        load_model(folder)


@pytest.mark.parametrize("change, words", [
    ({"step": "4"}, "step = '4': damaged"), ({"step": 4.0}, "step = 4.0"),
    ({"speed": 3}, "state.pt: damaged .*speed")])
def test_a_state_that_lies_is_named(place, change, words):
    assert train("--max_steps=4", "--eval_interval=100") == 0
    file = Path("out/tiny/step_000004/state.pt")
    torch.save(torch.load(file, weights_only=True) | change, file)
    with pytest.raises(UserError, match=words):
        train("--max_steps=6")


@pytest.mark.parametrize("change", [{"dense": 3}, {"dense": {}}, {"values": {"state": {}}},
                                    {"values": None}])
def test_moments_that_lie_are_named(place, change):
    assert train("--max_steps=4", "--eval_interval=100") == 0
    file = Path("out/tiny/step_000004/optimizer.pt")
    torch.save(torch.load(file, weights_only=True) | change, file)
    with pytest.raises(UserError, match="optimizer.pt does not belong to the model.pt beside it"):
        train("--max_steps=6")


def test_a_path_that_is_not_utf8_is_not_called_damaged(tmp_path):
    folder = save_model(tmp_path, tiny_bert())
    odd = tmp_path / "odd\udcff"
    try:
        folder.rename(odd)
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    with pytest.raises(UserError, match="no path that is not UTF-8: rename it"):
        load_model(odd)


def test_a_run_may_be_moved_over_its_initial_one(place):
    """It says itself whether its pooler was trained, and does not look for its ancestors."""
    assert train("--max_steps=2", "--eval_interval=100") == 0
    assert train("--max_steps=2", "--eval_interval=100", "--init_from=out/tiny",
                 "--out=out/more") == 0
    shutil.rmtree("out/tiny")
    Path("out/more").rename("out/tiny")
    assert Run("out/tiny").settings()["init_checkpoint"] == "out/tiny/step_000002"
    model = load_model("out/tiny")
    origin = init_from(Classifier(model.bert.config, 2), "out/tiny")
    assert origin == {"init_checkpoint": "out/tiny/step_000002", "first_step": 4,
                      "pooler_trained": False}
