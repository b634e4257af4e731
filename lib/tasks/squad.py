"""
SQuAD 1.1.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.common.errors import UserError
from lib.corpus.vocabulary import special_ids, tokenize
from lib.tasks.glue import Examples, encode_examples, read_split


@dataclass
class Question:
    id: str
    text: str
    context: str  # the paragraph
    answers: list  # (index of the first character, text)


def read_squad(path, answered=True):
    """The Questions of a SQuAD 1.1 file; UserError if it is not one, or if they are to be answered
    and one has no answer."""
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
    """Overlapping windows of paragraphs: [CLS] question [SEP] part of the paragraph [SEP]."""
    questions: list  # all Questions of the split
    question: list  # of each window its Question
    offsets: list  # of each window the (start, end) characters of its tokens, (tokens, 2)
    starts: np.ndarray  # (n, 2) where in ids an answer may start: from the first to before the last


def make_windows(tokenizer, questions, max_len, stride, train=False, what="encoding"):
    """Windows of up to max_len tokens that begin `stride` tokens apart, and {status of an answer:
    ids of the questions}. A window's label is the first answer if it has all of it, else [CLS],
    (0, 0) (Devlin et al.). With `train`, a question whose answer was not found has no window."""
    _, _, cls, sep, _ = special_ids(tokenizer)
    heads = [[cls, *encoding.ids[:min(64, max_len // 2)], sep] for encoding in
             tokenize(tokenizer, [question.text for question in questions], what)]
    contexts = list(dict.fromkeys(question.context for question in questions))
    paragraphs = {context: (encoding.ids, np.array(encoding.offsets, np.int32).reshape(-1, 2))
                  for context, encoding in zip(contexts, tokenize(tokenizer, contexts, what))}
    rows, statuses = [], {}
    for question, head in zip(questions, heads):
        tokens, offsets = paragraphs[question.context]
        first = (question.answers or [(0, "")])[0]
        start, end, status = answer_span(question.context, offsets, *first)
        room = max_len - len(head) - 1
        step = min(stride, room)
        begins = range(0, max(0, len(tokens) - room) + step, step)
        whole = [begin for begin in begins if begin <= start <= end < begin + room]
        status = status if whole or end < 0 else "in no window whole"
        statuses.setdefault(status, []).append(question.id)
        best = max_context(begins, room, len(tokens))
        for n, begin in enumerate(begins if end >= 0 or not train else ()):
            ids = np.array([*head, *tokens[begin:begin + room], sep], np.uint16)
            at = len(head) - begin  # from a token of the paragraph to its position in ids
            label = [start + at, end + at] if begin in whole else [0, 0]
            starts = np.searchsorted(best, [n, n + 1]) + at
            rows.append((ids, len(head), label, question, offsets[begin:begin + room], starts))
    ids, first, labels, question, offsets, starts = zip(*rows) if rows else [()] * 6
    return Windows(ids, np.array(first), np.array(labels), questions, question, offsets,
                   np.array(starts)), statuses


def max_context(begins, room, total):
    """Of each of `total` tokens the window that has most context for it, as Devlin et al.'s
    run_squad.py: the highest min(tokens to its left, to its right) + 0.01 * length, the first of
    equals; (total,), in ascending order. Windows hold `room` tokens from each of begins."""
    position, begin = np.arange(total), np.array(begins)[:, None]
    end = np.minimum(begin + room, total)
    context = np.minimum(position - begin, end - 1 - position) + 0.01 * (end - begin)
    inside = (begin <= position) & (position < end)
    return np.where(inside, context, -np.inf).argmax(0)


def answer_span(context, offsets, at, answer):
    """The first and last token of an answer at character `at` of a paragraph, and a status; the
    tokens are (0, -1) if there is no span."""
    if context[at:at + len(answer)] != answer or not answer:
        return 0, -1, "not at its offset"
    start = np.searchsorted(offsets[:, 1], at, side="right")
    end = np.searchsorted(offsets[:, 0], at + len(answer)) - 1
    if end < start:
        return 0, -1, "without a token"
    exact = context[offsets[start, 0]:offsets[end, 1]].strip() == answer  # GPT-2 tokens have spaces
    return start, end, "exact" if exact else "cuts a token"


def load_examples(task, split, tokenizer, max_len, stride):
    """The Examples of a split of any task; of SQuAD its Windows, and a report of the answers."""
    path = f"{task.folder}/{split}"
    if task.name != "squad":
        return encode_examples(tokenizer, *read_split(task, split), max_len, path)
    questions = read_squad(f"{path}-v1.1.json")
    result, statuses = make_windows(tokenizer, questions, max_len, stride, split == "train", path)
    labels = ", ".join(f"{len(ids):,} {status} (the first: {ids[0]})"
                       for status, ids in statuses.items())
    print(f"{path}: {len(questions):,} questions, {len(result.ids):,} windows, {labels}")
    return result


def best_answers(windows, scores, spans):
    """{question id: the text of the best span over its windows, '' if there is none}. scores: (n,),
    of each window, -inf for none; spans: (n, 2), start and end in its ids."""
    texts = {question.id: "" for question in windows.questions}
    for n in np.argsort(scores, kind="stable"):  # the best one comes last
        if scores[n] > -np.inf:
            question = windows.question[n]
            (start, _), (_, end) = windows.offsets[n][spans[n] - windows.first[n]]
            texts[question.id] = question.context[start:end].strip()
    return texts
