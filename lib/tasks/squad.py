"""
Read SQuAD 1.1, cut its paragraphs into windows, and turn predicted spans into answers.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.common.errors import UserError
from lib.corpus.vocabulary import special_ids, tokenize
from lib.tasks.examples import Examples


@dataclass
class Question:
    id: str
    text: str
    context: str  # the paragraph
    answers: list  # (index of the first character, text)


def read_squad(path, answered=True):
    """Read the Questions of a SQuAD 1.1 file; UserError if it is not one, or if they are to be
    `answered` and one has no answer."""
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        questions = [Question(qa["id"], qa["question"], paragraph["context"],
                              [(a["answer_start"], a["text"])
                               for a in (qa["answers"] if answered else ())])
                     for article in articles for paragraph in article["paragraphs"]
                     for qa in paragraph["qas"]]
        for question in questions:
            texts = question.text, question.context, *(text for _, text in question.answers)
            if {*map(type, texts)} != {str} or {type(at) for at, _ in question.answers} - {int}:
                raise TypeError(f"question {question.id}: a text or answer_start of another type")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not a file of SQuAD 1.1: {error!r}") from None
    empty = [question.id for question in questions if not question.answers]
    if empty and answered:
        raise UserError(f"{path}: question {empty[0]} has no answer: is it SQuAD 2.0?")
    return questions


@dataclass
class Windows(Examples):
    """Overlapping windows of paragraphs: [CLS] question [SEP] tokens of the paragraph [SEP]."""
    questions: list  # all Questions of the split
    question_of_window: list  # the Question of each window
    offsets: list  # characters of each window's paragraph tokens: (tokens, 2), begin and end
    starts: np.ndarray  # (n, 2) an answer may start at starts[n, 0] to starts[n, 1] - 1


def make_windows(tokenizer, questions, max_len, stride, train=False, what="encoding"):
    """Cut paragraphs into windows of up to max_len tokens that begin `stride` tokens apart. A
    window's label is the first answer, or (0, 0), which is [CLS], if not all of it is inside
    (Devlin et al.). With `train`, a question without its answer in the paragraph has no window.
    Returns Windows, and {status of an answer, see answer_span: ids of the questions}."""
    special = special_ids(tokenizer)
    heads = [[special.cls, *encoding.ids[:min(64, max_len // 2)], special.sep] for encoding in
             tokenize(tokenizer, [question.text for question in questions], what)]
    contexts = list(dict.fromkeys(question.context for question in questions))
    paragraphs = {context: (encoding.ids, np.array(encoding.offsets, np.int32).reshape(-1, 2))
                  for context, encoding in zip(contexts, tokenize(tokenizer, contexts, what))}
    rows, statuses = [], {}
    for question, head in zip(questions, heads):
        tokens, offsets = paragraphs[question.context]
        first_answer = (question.answers or [(0, "")])[0]
        start, end, status = answer_span(question.context, offsets, *first_answer)
        room = max_len - len(head) - 1
        step = min(stride, room)
        begins = range(0, max(0, len(tokens) - room) + step, step)
        whole = [begin for begin in begins if begin <= start <= end < begin + room]
        status = status if whole or end < 0 else "in no window whole"
        statuses.setdefault(status, []).append(question.id)
        best = max_context(begins, room, len(tokens))
        for n, begin in enumerate(begins if end >= 0 or not train else ()):
            ids = np.array([*head, *tokens[begin:begin + room], special.sep], np.uint16)
            shift = len(head) - begin  # from a token of the paragraph to its position in ids
            label = [start + shift, end + shift] if begin in whole else [0, 0]
            starts = np.searchsorted(best, [n, n + 1]) + shift
            rows.append((ids, len(head), label, question, offsets[begin:begin + room], starts))
    columns = zip(*rows) if rows else [()] * 6
    ids, first_length, labels, question_of_window, offsets, starts = columns
    return Windows(ids, np.array(first_length), np.array(labels), special.pad, questions,
                   question_of_window, offsets, np.array(starts)), statuses


def max_context(begins, room, total):
    """Choose for each of `total` tokens the window that has most context for it. The context is
    min(tokens to the left, tokens to the right) + 0.01 * length, as in Devlin et al.'s
    run_squad.py; the first of equal windows wins. Windows hold `room` tokens from each of `begins`.
    Returns the windows' numbers (total,), in ascending order."""
    position, begin = np.arange(total), np.array(begins)[:, None]
    end = np.minimum(begin + room, total)
    context = np.minimum(position - begin, end - 1 - position) + 0.01 * (end - begin)
    inside = (begin <= position) & (position < end)
    return np.where(inside, context, -np.inf).argmax(0)


def answer_span(context, offsets, at, answer):
    """Find the tokens of an answer that begins at character `at` of a paragraph. Returns the first
    and the last one, (0, -1) if there is none, and a status for a person."""
    if context[at:at + len(answer)] != answer or not answer:
        return 0, -1, "not at its offset"
    start = np.searchsorted(offsets[:, 1], at, side="right")
    end = np.searchsorted(offsets[:, 0], at + len(answer)) - 1
    if end < start:
        return 0, -1, "without a token"
    exact = context[offsets[start, 0]:offsets[end, 1]].strip() == answer  # GPT-2 tokens have spaces
    return start, end, "exact" if exact else "cuts a token"


def best_answers(windows, scores, spans):
    """Answer each question with the best span over its windows: {question id: text}. scores: (n,),
    of the windows' spans, -inf without one; spans: (n, 2), their first and last position. Without
    a span the text is ''."""
    texts = {question.id: "" for question in windows.questions}
    for n in np.argsort(scores, kind="stable"):  # the best one comes last
        if scores[n] > -np.inf:
            question = windows.question_of_window[n]
            (start, _), (_, end) = windows.offsets[n][spans[n] - windows.first_length[n]]
            texts[question.id] = question.context[start:end].strip()
    return texts
