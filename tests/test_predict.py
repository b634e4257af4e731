"""
Predictions on new text, and the search for an answer.
"""
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import measure
from lib.errors import UserError
from lib.predict import best_spans, predict_examples
from lib.squad import Question, Window
from lib.tasks import Example
from lib.tokenizer import text_tokenizer
from lib.weights import load_model
from model import Classifier
from tests.helpers import tiny_bert, tune


def rows_of(path):
    return [line.split("\t") for line in Path(path).read_text().removesuffix("\n").split("\n")]


def predict(run, file):
    measure.main(["predict", str(run), str(file), "--out", "said", "--device", "cpu"])
    return rows_of("said.tsv")


@torch.no_grad()
def say(run, *texts):
    """The logits of one example, alone and without padding."""
    tokenizer, model = text_tokenizer(run / "vocab.txt"), load_model(run).eval()
    parts = [[*tokenizer.encode(text, add_special_tokens=False).ids, 3] for text in texts]
    ids = [2, *itertools.chain(*parts)]
    types = [int(n > len(parts[0])) for n in range(len(ids))]
    return model(torch.tensor([ids]), token_types=torch.tensor([types]))[0]


def test_classes_with_probabilities(tuned):
    assert tune("--epochs=1") == 0
    run, vocab = Path("out/tiny_own/seed0"), Path("tiny.txt").read_text().split()[5:]
    texts = [" ".join(np.random.default_rng(n).choice(vocab, n)) for n in (5, 1, 30)]
    texts += ["", "a [SEP] cat", "cat " * 30 + "dog " * 30]  # max_len is 32
    Path("new.tsv").write_text("\n".join(["id\tsentence", *(f"7\t{text}" for text in texts)]))
    header, *rows = predict("out/tiny_own", "new.tsv")
    assert header == ["id", "sentence", "prediction", "probability"]  # other columns stay
    for text, (_, said, label, probability) in zip(texts, rows, strict=True):
        expected = say(run, " ".join(text.split()[:30])).softmax(0)[int(label == "none")].item()
        assert said == text and expected > 0.4999
        assert float(probability) == pytest.approx(expected, abs=1e-4)
    Path("new.tsv").write_text("text\na\n")
    with pytest.raises(UserError, match="new.tsv:1: columns"):
        predict(run, "new.tsv")


def test_answers_with_scores(tuned):
    """Learned by heart, from windows of 24 tokens. Each answer is the best span of all."""
    args = ["--task=squad", "--max_len=24", "--doc_stride=8", "--dropout=0", "--max_steps=60"]
    assert tune(*args) == 0
    run = Path("out/tiny_squad/seed0")
    result = json.loads((run / "eval_results.json").read_text())
    assert (result["eval_f1"], result["eval_exact_match"]) == (100, 100)
    found = json.loads((run / "predictions_dev.json").read_text())
    assert found == {"q0": "cat", "q1": "cat"}
    contexts = ["the cat saw", "the dog saw the cat .", ""]
    paragraphs = [{"context": context, "qas": [{"id": context, "question": "no cat ?"}]}
                  for context in contexts]  # questions without answers
    Path("new.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    header, *rows = predict("out/tiny_squad", "new.json")
    assert header == ["id", "question", "prediction", "score"]
    assert [row[0] for row in rows] == contexts and rows[2][2:] == ["", "-inf"]
    for context, _, answer, score in rows[:2]:
        words, (first, *_, last) = context.split(), answer.split() * 2
        start, end = say(run, "no cat ?", context)[5:-1].T
        best = start[words.index(first)] + end[words.index(last)]
        assert float(score) == pytest.approx(best.item(), abs=2e-3)


@pytest.mark.parametrize("longest", [30, 2, 1])
def test_best_spans(longest):
    """Against all pairs, one by one. The last two windows have no place for a start."""
    torch.manual_seed(longest)
    windows = [Window(Question("q", "", "", []), np.zeros(length), first, None, starts, (0, 0))
               for length, first, starts in [(40, 5, (5, 39)), (31, 3, (7, 29)), (12, 9, (9, 10)),
                                             (7, 5, (6, 6)), (6, 5, (5, 5))]]
    logits = torch.randn(5, 40, 2)
    logits[0, 2] = logits[1, 30] = logits[2, 20] = 99  # in the question, its [SEP], the padding
    for window, scores, row in zip(windows, logits.tolist(),
                                   best_spans(logits, windows, longest)):
        spans = [(scores[start][0] + scores[end][1], start, end) for start in range(*window.starts)
                 for end in range(start, min(start + longest, len(window.ids) - 1))]
        if spans:
            assert row.tolist() == pytest.approx(max(spans))
        assert (row[0] == -math.inf) == (not spans)


def test_padding_changes_no_prediction_and_dropout_none():
    """A model that is training predicts in evaluation mode, and trains on."""
    model = Classifier(tiny_bert(dropout=0.5, memory_layers=(2,)).bert.config, 3).train()
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(5, 40, length), 3, None) for length in (3, 16, 9, 12)]
    together, again = (predict_examples(model, examples) for _ in range(2))
    alone = predict_examples(model, examples, batch_size=1)
    assert (together == again).all() and model.training
    np.testing.assert_allclose(together, alone, atol=1e-6)
