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
        expected = say(run, " ".join(text.split()[:30])).softmax(0)
        assert said == text and label == ["animal", "none"][expected.argmax()]
        assert float(probability) == pytest.approx(expected.max().item(), abs=1e-4)
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
    paragraphs = [{"context": context, "qas": [{"id": str(n), "question": "no cat ?"}]}
                  for n, context in enumerate(contexts)]  # questions without answers
    Path("new.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    header, *rows = predict("out/tiny_squad", "new.json")
    assert header == ["id", "question", "prediction", "score"]
    assert rows[2] == ["2", "no cat ?", "", "-inf"]
    for (_, question, answer, score), context in zip(rows[:2], contexts):
        logits, words = say(run, question, context), context.split()
        first = len(logits) - 1 - len(words)
        scores = {" ".join(words[s:e + 1]): logits[first + s, 0] + logits[first + e, 1]
                  for s in range(len(words)) for e in range(s, len(words))}
        assert answer == max(scores, key=scores.get)
        assert float(score) == pytest.approx(scores[answer].item(), abs=2e-3)


def best_span_by_hand(logits, window, longest):
    """All pairs of one window, one by one."""
    last = len(window.ids) - 1  # a [SEP]
    pairs = [(float(logits[s, 0] + logits[e, 1]), s, e) for s in range(*window.starts)
             for e in range(window.first_length, last) if 0 <= e - s < longest]
    return max(pairs, default=(-math.inf, 0, 0))


@pytest.mark.parametrize("longest", [30, 2, 1])
def test_best_spans(longest):
    torch.manual_seed(longest)
    windows = [Window(Question("q", "", "", []), np.zeros(length), first, None, starts, (0, 0))
               for length, first, starts in [(40, 5, (5, 39)), (31, 3, (7, 29)), (12, 9, (9, 10)),
                                             (7, 5, (6, 6)), (6, 5, (5, 5))]]  # the last: empty
    logits = torch.randn(5, 40, 2)
    logits[0, 2] = logits[1, 30] = logits[2, 20] = 99  # in the question, its [SEP], the padding
    found = best_spans(logits, windows, longest)
    for row, window in enumerate(windows):
        score, *span = best_span_by_hand(logits[row], window, longest)
        assert found[row, 0] == pytest.approx(score)
        assert found[row, 1:].tolist() == span or score == -math.inf
    assert found[3, 0] == found[4, 0] == -math.inf


def test_padding_changes_no_prediction_and_dropout_none():
    """A model that is training predicts in evaluation mode, and trains on."""
    model = Classifier(tiny_bert(dropout=0.5, memory_layers=(2,)).bert.config, 3).train()
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(5, 40, length), 3, None) for length in (3, 16, 9, 12)]
    together, again = (predict_examples(model, examples) for _ in range(2))
    alone = predict_examples(model, examples, batch_size=1)
    assert (together == again).all() and model.training
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together.sum(1), 1, atol=1e-6)
    assert len(np.unique(together[:, 0])) == 4
