"""
SQuAD: windows as run_squad.py cuts them, answers through windows, the official script's scores.
"""
import json
import math

import numpy as np
import pytest
import torch

from lib import squad
from lib.settings import UserError
from lib.tasks import SQUAD, load_examples
from lib.tokenizer import SPECIALS, load_tokenizer, wordpiece_tokenizer
from tests.helpers import SHARED, squad_file

FOX = "The Café's 1990s fox — \"Ünïcode\" — sat.  It sat on  the cat."


@pytest.fixture
def fox():
    words = "the cafe s 1990 ##s fox sat it on cat . ? \" '"
    return wordpiece_tokenizer([*SPECIALS, *words.split()])


@pytest.mark.parametrize("answer, fate", [
    ("Café's 1990s fox", "exact"), ("1990", "exact"), ("\"Ünïcode\" — sat.", "exact"),
    ("cat", "exact"), ("It sat on  the", "exact"), (FOX, "in no window"),
    ("1990s f", "cuts a token"), ("99", "cuts a token"), ("  ", "in no window")])
def test_answers_come_back_through_windows(fox, answer, fate):
    """Windows have 13 tokens, 7 of the paragraph, and begin 2 apart; the last one has its end.

    The first answer is the label.
    """
    question = squad.Question("q", "it sat?", FOX, [(FOX.index(answer), answer), (0, "The")])
    windows = squad.make_windows(fox, [question], 13, 2)
    tokens = fox.encode(FOX).ids
    head = fox.encode("[CLS] it sat ? [SEP]").ids
    assert len(windows) == math.ceil((len(tokens) - 7) / 2) + 1
    for begin, window in zip(range(0, 99, 2), windows):
        assert window.ids.tolist() == [*head, *tokens[begin:begin + 7], 3]
    labelled = [window for window in windows if window.label != (0, 0)]
    assert (labelled == []) == (fate == "in no window")
    for window in labelled:
        answers = squad.best_answers([window], [[1.0, *window.label]])
        assert window.label[1] < len(window.ids) - 1  # not on the [SEP]
        assert (answers[question][0] == answer) == (fate == "exact")


def test_a_window_steps_over_nothing_and_a_long_question_is_cut(fox):
    """The step is no more than what a window holds. A paragraph may be empty."""
    questions = [squad.Question("q", "it " * 90, text, []) for text in (FOX, "")]
    windows = squad.make_windows(fox, questions, 40, 128)
    assert all(window.ids[:22].tolist() == [2, *[12] * 20, 3] for window in windows)
    assert windows[1].ids[22:].tolist() == [*fox.encode(FOX).ids[17:], 3]  # 17 are in the first
    assert [window.question for window in windows] == [questions[0], *questions]
    [window] = squad.make_windows(fox, questions[:1], 200, 128)
    assert window.first_length == 66  # 64 tokens of the question
    assert {len(window.ids) for window in squad.make_windows(fox, questions[:1], 7, 128)} == {7}


def most_context_by_hand(spans, position):
    """Choose a window as run_squad.py does, token by token; spans: (start, length)."""
    best, window = None, None
    for n, (start, length) in enumerate(spans):
        end = start + length - 1
        if not start <= position <= end:
            continue
        score = min(position - start, end - position) + 0.01 * length
        if best is None or score > best:
            best, window = score, n
    return window


@pytest.mark.parametrize("room, stride", [(320, 128), (9, 1), (9, 4), (9, 9), (110, 64), (500, 3)])
def test_an_answer_starts_where_it_has_most_context(fox, room, stride):
    """One window of each token, as run_squad.py chooses it."""
    for total in (1, room - 1, room, room + 1, 777):
        question = squad.Question("q", "it", "cat " * total, [(0, "cat")])
        windows = squad.make_windows(fox, [question], room + 4, stride)
        spans, start = [], 0
        while not spans or sum(spans[-1]) < total:  # run_squad.py's windows
            spans.append((start, min(room, total - start)))
            start += min(spans[-1][1], stride)
        assert [len(window.ids) for window in windows] == [length + 4 for _, length in spans]
        found = [(n, start + at - 3) for n, (start, _) in enumerate(spans)
                 for at in range(*windows[n].starts)]
        assert found == [(most_context_by_hand(spans, t), t) for t in range(total)]


@pytest.mark.parametrize("longest", [30, 2, 1])
def test_best_spans(longest):
    """Against all pairs, one by one. The last two windows have no place for a start.

    A span has 30 tokens by default. In the first window the best one would have 34.
    """
    torch.manual_seed(longest)
    windows = [squad.Window(None, np.zeros(length), first, None, starts, (0, 0))
               for length, first, starts in [(40, 5, (5, 39)), (31, 3, (7, 29)), (12, 9, (9, 10)),
                                             (7, 5, (6, 6)), (6, 5, (5, 5))]]
    logits = torch.randn(5, 40, 2)
    logits[0, 2] = logits[1, 30] = logits[2, 20] = 99  # in the question, its [SEP], the padding
    logits[0, 5, 0] = logits[0, 38, 1] = 9
    found = squad.best_spans(logits, windows, *[longest][longest == 30:])
    for window, scores, row in zip(windows, logits.tolist(), found):
        spans = [(scores[start][0] + scores[end][1], start, end) for start in range(*window.starts)
                 for end in range(start, min(start + longest, len(window.ids) - 1))]
        if spans:
            assert row.tolist() == pytest.approx(max(spans))
        assert (row[0] == -math.inf) == (not spans)


def test_the_best_window_answers(fox):
    """Two questions may have the same id. Without a span the answer is empty."""
    questions = [squad.Question("q", "it?", FOX, []) for _ in range(2)]
    windows = squad.make_windows(fox, questions, 16, 11)
    assert len(windows) == 4
    spans = [(1.0, 5, 5), (3.0, 6, 7), (-np.inf, 0, 0), (-np.inf, 0, 0)]
    (start, _), (_, end) = windows[1].offsets[2:4]
    assert squad.best_answers(windows, spans) == {
        questions[0]: (FOX[start:end], 3.0), questions[1]: ("", -np.inf)}


def test_an_answer_has_no_space_around_it(fox):
    """A token of byte-level BPE has the space before its word."""
    [window] = squad.make_windows(fox, [squad.Question("q", "it?", "the cat sat", [])], 16, 8)
    window.offsets[1] = 3, 7
    assert squad.best_answers([window], [(1.0, 5, 5)])[window.question] == ("cat", 1.0)


@pytest.mark.skipif(not (SHARED / "squad").is_dir(), reason="no SQuAD on this machine")
def test_squad_gold_answers_come_back():
    """Dev's first answers score 100. Labelled in windows and mapped back they are the same text,
    unless an answer ends inside a token."""
    tokenizer = load_tokenizer(SHARED / "bert-vocab/vocab.txt")
    questions = squad.read_squad(SHARED / "squad/dev-v1.1.json")
    gold = {question: (question.answers[0][1], 0.0) for question in questions}
    assert squad.score_squad(gold) == {"exact_match": 100, "f1": 100}
    windows = squad.make_windows(tokenizer, questions, 384, 128)
    assert (len(questions), len(windows)) == (10570, 10833)
    spans = [(max(window.label) - 1, *window.label) for window in windows]
    back = squad.best_answers(windows, spans)
    wrong = [question for question in questions if back[question][0] != gold[question][0]]
    assert len(wrong) == 34
    assert all(gold[question][0] in back[question][0] for question in wrong)


SQUAD_CASES = [  # prediction, references, exact match and F1 of the official evaluate-v1.1.py
    ("The Denver Broncos!", ["Denver Broncos"], 100, 100),
    ("Denver", ["Denver Broncos", "the Broncos"], 0, 66.67),
    ("", ["x"], 0, 0),
    ("", ["a."], 100, 0),
    ("U.S.", ["US", "u s"], 100, 100),
    ("theatre", ["the atre"], 0, 0),
    ("café Ünïcode", ["Café ünïcode"], 100, 100),
    ("x the–a y", ["x – y"], 100, 100),
    ("one  two\tthree\xa0four", ["one two three four"], 100, 100),
    ("red red blue", ["red blue blue"], 0, 66.67),
    ("red red blue", ["red red"], 0, 80),
    ("red dog", ["cat", "red dog"], 100, 100),
    ("£5 a_b", ["£5", "a_b"], 0, 66.67),
    ("it is", ["is it"], 0, 100)]


@pytest.mark.parametrize("prediction, references, exact, f1", SQUAD_CASES)
def test_squad_scores(prediction, references, exact, f1):
    """They are means: here with an answer that scores 100."""
    question = squad.Question("q", "?", "", [(0, text) for text in references])
    answers = {question: (prediction, 0.0), squad.Question("q", "?", "", [(0, "x")]): ("x", 0.0)}
    expected = {"exact_match": 50 + exact / 2, "f1": 50 + f1 / 2}
    assert squad.score_squad(answers) == pytest.approx(expected, abs=0.01)


def test_a_file_of_squad(tmp_path, fox):
    """New questions have no answers, those of fine-tuning have. Another file gets a line."""
    path = tmp_path / "train-v1.1.json"
    data = squad_file(path)
    del data["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    path.write_text(json.dumps(data))
    first, second = squad.read_squad(path)
    assert (first.id, first.text, first.answers) == ("q0", "no cat ?", [])
    assert (second.context, second.answers) == ("the cat saw the dog . " * 6, [(4, "cat")])
    with pytest.raises(UserError, match="train-v1.1.json: question q0 has no answers"):
        load_examples(SQUAD._replace(folder=tmp_path), "train", fox, 24, 8)
    for text in ('{"data": [{"title": "t"}]}', "[1]", json.dumps(data).replace("4", "null")):
        path.write_text(text)
        with pytest.raises(UserError, match="train-v1.1.json"):
            squad.read_squad(path)
