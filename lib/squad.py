"""
Read SQuAD 1.1, cut its paragraphs into windows, turn spans into answers and score them.
"""
import functools
import re
import string
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from lib.files import read_json
from lib.settings import UserError
from lib.tokenizer import special_ids, tokenize


@dataclass(eq=False)
class Question:
    id: str
    text: str
    context: str  # the paragraph
    answers: list  # (index of the first character, text)


@dataclass
class Window:
    """One of the overlapping parts of a paragraph: [CLS] question [SEP] tokens [SEP]."""
    question: Question
    ids: np.ndarray  # (length,) token ids
    first_length: int  # tokens of [CLS] question [SEP]
    offsets: np.ndarray  # (tokens, 2) characters where each token of the paragraph begins, ends
    starts: np.ndarray  # an answer may start at positions starts[0] to starts[1] - 1
    label: tuple  # positions of the answer's first and last token; (0, 0) if it is not inside


def read_squad(path, answered=False):
    """Read the Questions of a file in the layout of SQuAD 1.1. New ones have no answers.

    A null is no answer. answered: expect that all questions have one.
    """
    questions = []
    try:
        for article in read_json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    answers = [(int(answer["answer_start"]), answer["text"])
                               for answer in qa.get("answers") or [] if answer["text"]]
                    if answered and not answers:
                        raise UserError(f"{path}: question {qa['id']} has no answers: add them, or "
                                        "leave it out")
                    questions.append(
                        Question(qa["id"], qa["question"], paragraph["context"], answers))
    except (LookupError, TypeError) as error:
        raise UserError(f"{path}: not a file of SQuAD 1.1 ({error!r})") from None
    if not questions:
        raise UserError(f"{path}: no question in it")
    return questions


def make_windows(tokenizer, questions, max_len, stride):
    """Cut paragraphs into Windows of at most max_len tokens, as Devlin et al. do.

    They begin `stride` tokens apart. The label is the question's first answer.
    """
    @functools.cache  # several questions have the same paragraph
    def encode(paragraph):
        found = tokenizer.encode(paragraph, add_special_tokens=False)
        return found.ids, np.array(found.offsets, np.int32).reshape(-1, 2)

    special = special_ids(tokenizer)
    windows = []
    heads = tokenize(tokenizer, [question.text for question in questions], "questions")
    for question, encoding in zip(questions, heads):
        head = [special.cls, *encoding.ids[:min(64, max_len // 2)], special.sep]
        tokens, offsets = encode(question.context)
        character, answer = question.answers[0] if question.answers else (0, "")
        first = np.searchsorted(offsets[:, 1], character, side="right")
        last = np.searchsorted(offsets[:, 0], character + len(answer)) - 1

        room = max_len - len(head) - 1
        step = min(stride, room)
        begins = range(0, max(0, len(tokens) - room) + step, step)
        best = max_context(begins, room, len(tokens))
        for n, begin in enumerate(begins):
            end = begin + room
            shift = len(head) - begin  # from a token's place in the paragraph to its position
            ids = np.array([*head, *tokens[begin:end], special.sep], np.int32)
            starts = np.searchsorted(best, [n, n + 1]) + shift
            is_inside = begin <= first <= last < end
            label = (first + shift, last + shift) if is_inside else (0, 0)
            windows.append(Window(question, ids, len(head), offsets[begin:end], starts, label))
    return windows


def max_context(begins, room, total):
    """Choose the window that has most context for each of `total` tokens.

    The context is min(tokens to the left, tokens to the right) + 0.01 * length, as in Devlin et
    al.'s run_squad.py. A window holds `room` tokens from one of `begins`. Returns the numbers of
    the windows (total,), in ascending order.
    """
    position = np.arange(total)
    begin = np.array(begins)[:, None]
    end = np.minimum(begin + room, total)
    context = np.minimum(position - begin, end - 1 - position) + 0.01 * (end - begin)
    inside = (begin <= position) & (position < end)
    return np.where(inside, context, -np.inf).argmax(0)


def best_spans(logits, windows, longest=30):
    """Choose each window's span with the highest sum of two logits.

    A span has at most `longest` tokens, as in Devlin et al. All spans are tried.
    logits: (batch, time, 2), of the start and the end. Returns (batch, 3): the score, the first and
    the last position. A window without a span scores -inf.
    """
    spans = np.full((len(windows), 3), -np.inf)
    for span, (start, end), window in zip(spans, logits.mT, windows):
        scores = start[:, None] + end  # (time, time)
        allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(longest - 1)
        allowed[:window.starts[0]] = allowed[window.starts[1]:] = False
        allowed[:, len(window.ids) - 1:] = False  # the [SEP] and padding
        scores = scores.where(allowed, -torch.inf)
        first, last = divmod(scores.argmax().item(), len(start))
        span[:] = scores[first, last], first, last
    return spans


def best_answers(windows, spans):
    """Answer each question with the best span of its windows: {Question: (text, score)}.

    spans: (windows, 3), see best_spans. Without a span the text is empty and the score
    -inf.
    """
    answers = {window.question: ("", -np.inf) for window in windows}
    for window, (score, first, last) in zip(windows, spans):
        question = window.question
        if score > answers[question][1]:
            start = window.offsets[int(first) - window.first_length, 0]
            end = window.offsets[int(last) - window.first_length, 1]
            answers[question] = question.context[start:end].strip(), score
    return answers


def score_squad(answers):
    """Compute F1 and exact match in percent, as the official evaluate-v1.1.py does.

    Each counts the reference answer that fits best. answers: {Question: (text, score)}.
    """
    exact = f1 = 0.0
    for question, (text, _) in answers.items():
        predicted = normalized_words(text)
        references = [normalized_words(reference) for _, reference in question.answers]
        exact += predicted in references
        f1 += max(words_f1(predicted, words) for words in references)
    return {"exact_match": 100 * exact / len(answers), "f1": 100 * f1 / len(answers)}


def words_f1(predicted, words):
    common = Counter(predicted) & Counter(words)
    return 2 * common.total() / max(1, len(predicted) + len(words))


def normalized_words(answer):
    """Split an answer into words in lower case, without ASCII punctuation and articles."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()
