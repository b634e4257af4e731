"""
Know what a model was trained on: no table shows text that was training text.
"""
import json
import shutil
from pathlib import Path

import torch

import measure
from lib.run import Run
from lib.weights import model_hash, open_corpus
from tests.helpers import assert_one_line, prepare, save_model, tiny_bert, train


def measured(*args):
    return measure.main(["table", *args, "--device", "cpu"])


def test_text_that_a_model_was_trained_on_is_not_measured(place, capsys):
    """Train on data/tiny and train that model on; then split the same documents otherwise."""
    assert train("--max_steps=2", "--eval_interval=100") == 0
    assert train("--max_steps=2", "--eval_interval=100", "--init_from=out/tiny",
                 "--out=out/more") == 0
    first, second = Path("text.txt").read_text().split("\n\n", 1)
    Path("first.txt").write_text(first)
    Path("second.txt").write_text(second)
    prepare("text", "anew", "second.txt", "first.txt", "--vocab", "tiny.txt", "--val_every", "4")
    for run in ("out/tiny", "out/more"):
        words = [f"{run} was trained on the documents of data/anew, split otherwise", "--seen"]
        assert_one_line(capsys, run, "--data", "anew", main=lambda args: measured(*args),
                        words=words)
        assert_one_line(capsys, "tiny.py", "--dataset=anew", f"--init_from={run}", "--out=out/new",
                        words=words)
        measured(run, "--data", "anew", "--seen")
        measured(run, "--data", "tiny")
        assert "trained on" not in capsys.readouterr().out  # nothing to say


def test_a_run_keeps_what_it_and_its_initial_model_were_trained_on(place):
    meta = json.loads(Path("data/tiny/meta.json").read_text())
    Path("text.txt").write_text("a cat .\n\na dog .\n\nan elk .\n" * 10)
    prepare("text", "others", "text.txt", "--vocab", "tiny.txt", "--val_every", "3")
    short = ["--max_steps=1", "--seq_len=4", "--batch_size=1", "--eval_interval=100"]
    assert train("--max_steps=1", "--eval_interval=100") == 0
    assert train(*short, "--dataset=others", "--init_from=out/tiny", "--out=out/more") == 0
    first, second = Run("out/more").settings()["trained_on"]
    assert first == {"name": "tiny", "documents": meta["documents_sha256"],
                     "train": meta["sha256"]["train"]}
    assert second["name"] == "others"
    assert second["documents"] != first["documents"]
    assert train(*short[1:], "--max_steps=2", "--dataset=others", "--init_from=out/tiny",
                 "--out=out/more") == 0  # goes on
    assert Run("out/more").settings()["trained_on"] == [first, second]


def test_text_that_is_not_known_is_said(place, capsys):
    assert train("--max_steps=1", "--eval_interval=100") == 0
    Path("text.txt").write_text("the shy elk bit .\n" + Path("text.txt").read_text())
    prepare("text", "tiny", "text.txt", "--vocab", "tiny.txt", "--val_every", "10", "--force")
    capsys.readouterr()
    measured("out/tiny", "--data", "tiny")
    assert "out/tiny was trained on another text named tiny\n" in capsys.readouterr().out
    hub = save_model("hub", tiny_bert(vocab_size=25))  # of no run
    Path("hub/config.json").unlink()
    shutil.copy("tiny.txt", "hub/vocab.txt")
    open_corpus("tiny", hub)
    assert "not known whether it was trained on text of" in capsys.readouterr().out


def test_a_hash_tells_weights_apart(tmp_path):
    model = tiny_bert(memory_layers=(2,))
    before = model_hash(save_model(tmp_path / "a", model))
    assert model_hash(save_model(tmp_path / "b", tiny_bert(memory_layers=(2,)))) == before
    with torch.no_grad():
        model.bert.layers[1].memory.values.weight[0, 0] += 1e-3
    assert model_hash(save_model(tmp_path / "c", model)) != before
