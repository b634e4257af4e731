"""
A fine-tuned model on new text, and what fine-tuning writes of its dev split.
"""
import itertools
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import measure
from for_transformers.export import export
from lib.errors import UserError
from lib.predict import (
    predict_examples,
    predict_file,
    score_dev,
    write_dev_predictions,
    write_submissions,
)
from lib.tasks import TEXTS, Examples, find_task, pick_columns, read_split, read_table
from lib.tokenizer import load_tokenizer
from lib.weights import load_model
from model import Classifier, SpanReader
from tests.helpers import PIECES, ROOT, save_model, squad_file, tiny_bert, tune


def rows_of(path):
    return [line.split("\t") for line in Path(path).read_text().removesuffix("\n").split("\n")]


def predict(run, file):
    measure.main(["predict", str(run), str(file), "--out", "said", "--device", "cpu"])
    return rows_of("said.tsv")


@torch.no_grad()
def say(run, *texts):
    """The logits of one example, alone and without padding."""
    tokenizer, model = load_tokenizer(run / "vocab.txt"), load_model(run).eval()
    tokenizer.encode_special_tokens = True
    parts = [[*tokenizer.encode(text, add_special_tokens=False).ids, 3] for text in texts]
    ids = [2, *itertools.chain(*parts)]
    types = [int(n > len(parts[0])) for n in range(len(ids))]
    return model(torch.tensor([ids]), token_types=torch.tensor([types]))[0]


def test_classes_with_probabilities(tuned):
    with Path("own/dev.tsv").open("a") as dev:
        dev.write("a [SEP] cat\tanimal\n")
    assert tune("--epochs=1") == 0
    run, vocab = Path("out/tiny_own/seed0"), Path("tiny.txt").read_text().split()[5:]
    texts = [" ".join(np.random.default_rng(n).choice(vocab, n)) for n in (5, 1, 30, 2)]
    texts.insert(2, "")  # an empty text stays in its place
    texts += ["a [SEP] cat", "cat " * 30 + "dog " * 30]
    Path("new.tsv").write_text("\n".join(["sentence", *texts]) + "\n\n")
    header, *rows = predict("out/tiny_own", "new.tsv")
    assert header == ["sentence", "prediction", "probability"] and len(rows) == 7
    labels = torch.load(run / "best/model.pt", weights_only=True)["labels"]
    for text, (said, label, probability) in zip(texts, rows, strict=True):
        expected = say(run, " ".join(text.split()[:30])).softmax(0)  # max_len is 32
        assert said == text and label == labels[expected.argmax()]
        assert float(probability) == pytest.approx(expected.max().item(), abs=1e-4)
    with pytest.raises(UserError, match="it would replace new.tsv"):
        measure.main(["predict", "out/tiny_own", "new.tsv", "--out", "new.tsv/"])
    Path("more.tsv").write_text("id\tlabel\tsentence\n7\tnone\tcat\n")  # other columns stay
    header, row = predict(run, "more.tsv")
    assert header == ["id", "label", "sentence", "prediction", "probability"]
    assert row[:3] == ["7", "none", "cat"]

    out = subprocess.run([sys.executable, ROOT / "measure.py", "predict", run, "-"], check=True,
                         input=Path("new.tsv").read_bytes(), capture_output=True)
    assert [line.split("\t") for line in out.stdout.decode().splitlines()][1:] == rows

    header, *dev = rows_of(run / "predictions_dev.tsv")
    assert header == ["index", "sentence", "label", "prediction", "probability"]
    assert [row[1:3] for row in dev] == rows_of("own/dev.tsv")[1:]
    _, *again = predict(run, "own/dev.tsv")
    assert [row[3:] for row in dev] == [row[2:] for row in again]
    right = np.mean([label == predicted for _, _, label, predicted, _ in dev])
    assert right == json.loads((run / "eval_results.json").read_text())["eval_accuracy"]


@pytest.mark.parametrize("text, message", [
    (None, r"new.tsv: no such file"),
    ("", "new.tsv: no row in it"), ("sentence\n", "new.tsv: no row in it"),
    ("text\na\n", (r"new.tsv:1: columns \['text'\]: expected a header with sentence, or .*; tabs "
                      "separate columns$")),
    ("id\tsentence\n1\ta\n\n3\tc\n", "new.tsv:3: 1 fields, expected 2"),
    ("sentence\na\tb\n", "new.tsv:2: 2 fields, expected 1")])
def test_a_file_that_cannot_be_read(workdir, text, message):
    if text is not None:
        Path("new.tsv").write_text(text)
    with pytest.raises(UserError, match=message):
        pick_columns(Path("new.tsv"), *read_table(Path("new.tsv")), TEXTS)


def test_scores_of_pairs(tuned):
    assert tune("--task=pairs", "--epochs=1") == 0
    header, *rows = predict("out/tiny_pairs", "pairs/test.tsv")
    assert header == ["sentence1", "sentence2", "prediction"] and len(rows) == 7
    for first, second, score in rows:
        expected = say(Path("out/tiny_pairs/seed0"), first, second)
        assert float(score) == pytest.approx(expected.item(), abs=1e-3)
    header, *rows = rows_of("out/tiny_pairs/seed0/predictions_dev.tsv")
    assert header == ["index", "sentence1", "sentence2", "label", "prediction"]
    assert [float(row[3]) for row in rows] == read_split(find_task("pairs"), "dev")[1].tolist()


def span_run(folder, **sizes):
    """A SpanReader on PIECES that was not trained, as a fine-tuned run."""
    sizes = {"vocab_size": len(PIECES), "max_len": 512, **sizes}
    save_model(f"{folder}/seed0", SpanReader(tiny_bert(**sizes).bert.config))
    shutil.copy("vocab.txt", f"{folder}/seed0")
    settings = {"task": "squad", "max_len": 16, "doc_stride": 4}
    Path(folder, "seed0/config.json").write_text(json.dumps(settings))


def test_windows_of_new_questions_are_those_of_training(workdir, monkeypatch):
    """16 tokens with a question of 3 leave room for 10 of 30, which begin 4 apart: 6 windows. For
    a folder of Hugging Face's they have 384 tokens, as Devlin et al.'s."""
    pytest.importorskip("safetensors")
    span_run("out/run")
    export("out/run", "folder")
    Path("new.tsv").write_text(f"question\tcontext\nthe cat sat\t{'cat ' * 30}\n")
    Path("long.tsv").write_text(f"question\tcontext\nthe cat sat\t{'cat ' * 500}\n")
    found = []
    monkeypatch.setattr("lib.predict.predict_examples", lambda model, windows: (
        found.append(windows.lengths.tolist()) or np.array([[-np.inf, 0, 0]] * len(windows.ids))))
    for run, file in (("out/run", "new.tsv"), ("folder", "long.tsv")):
        predict_file(run, Path(file), torch.device("cpu"))
    assert found == [[16] * 6, [384, 378]]


@pytest.mark.parametrize("training", [True, False])
def test_predicting_leaves_the_mode_as_it_was(training):
    model = Classifier(tiny_bert().bert.config, 2).train(training)
    predict_examples(model, Examples([np.array([2, 7, 3])], np.array([3]), None, 0))
    assert model.training == training


def test_each_dev_split_has_its_own_scores_and_file(tmp_path, monkeypatch):
    """Two matched rows, of which one is right, and three mismatched ones, which all are."""
    (tmp_path / "glue/MNLI").mkdir(parents=True)
    task, data = find_task("mnli", tmp_path), {}
    said = {"dev_matched": ([0, 1], [0, 0]), "dev_mismatched": ([1, 1, 2], [1, 1, 2])}
    for (suffix, split), (labels, predicted) in zip(task.dev.items(), said.values(), strict=True):
        rows = [f"a\t{split} {n}\t{task.labels[label]}\n" for n, label in enumerate(labels)]
        task.file(split).write_text("".join(["sentence1\tsentence2\tgold_label\n", *rows]))
        data[suffix] = types.SimpleNamespace(labels=np.array(labels), predicted=predicted)
    monkeypatch.setattr("lib.predict.predict_examples",
                        lambda model, examples, *more: np.eye(3)[examples.predicted])
    data = types.SimpleNamespace(task=task, dev=data)
    assert score_dev(None, data, 8, None) == {"accuracy": 0.5, "accuracy_mm": 1}
    write_dev_predictions(tmp_path, None, data, 8, None)
    for split, (_, predicted) in said.items():
        _, *rows = rows_of(tmp_path / f"predictions_{split}.tsv")
        assert [row[4] for row in rows] == [task.labels[n] for n in predicted]
        assert [row[2] for row in rows] == [f"{split} {n}" for n in range(len(rows))]


def test_submitted_scores_are_in_the_range_of_training(tmp_path, monkeypatch):
    """The lowest score of training is 1 here, not 0."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.tsv").write_text("sentence\tscore\na\t1\nb\t4\n")
    (tmp_path / "own/test.tsv").write_text("sentence\na\nb\nc\n")
    monkeypatch.setattr("lib.predict.predict_examples",
                        lambda *more: np.array([[-9.0], [2.0], [9.0]]))
    data = types.SimpleNamespace(task=find_task(str(tmp_path / "own")), test={"own": None},
                                 train=types.SimpleNamespace(labels=np.array([4.0, 1.0])))
    write_submissions(tmp_path, None, data, 8, None)
    assert rows_of(tmp_path / "own.tsv")[1:] == [["0", "1.000"], ["1", "2.000"], ["2", "4.000"]]


def test_answers_with_scores(tuned):
    args = ["--task=squad", "--max_len=24", "--doc_stride=8", "--dropout=0", "--max_steps=60"]
    assert tune(*args) == 0
    found = json.loads(Path("out/tiny_squad/seed0/predictions_dev.json").read_text())
    assert found == {"q0": "cat", "q1": "cat"}
    content = squad_file(Path("new.json"))
    for question in content["data"][0]["paragraphs"][0]["qas"]:
        del question["answers"]  # what one wants to know
    Path("new.json").write_text(json.dumps(content))
    header, *rows = predict("out/tiny_squad", "new.json")
    assert header == ["id", "question", "prediction", "score"]
    assert [row[:3] for row in rows] == [["q0", "no cat ?", "cat"], ["q1", "no cat ?", "cat"]]
    contexts = ["the cat saw", "the dog saw the cat .", ""]
    Path("new.tsv").write_text("\n".join(["context\tquestion", *(
        f"{context}\tno cat ?" for context in contexts)]))
    header, *table = predict("out/tiny_squad", "new.tsv")
    assert header == ["context", "question", "prediction", "score"]
    assert [row[0] for row in table] == contexts and table[2][2:] == ["", "-inf"]
    for context, question, answer, score in table[:2]:
        logits = say(Path("out/tiny_squad/seed0"), question, context)
        first = len(logits) - 1 - len(context.split())
        pairs = {(logits[s, 0] + logits[e, 1]).item(): (s, e) for s in range(first, len(logits) - 1)
                 for e in range(s, len(logits) - 1)}
        start, end = pairs[max(pairs)]
        assert answer == " ".join(context.split()[start - first:end - first + 1])
        assert float(score) == pytest.approx(max(pairs), abs=2e-3)
