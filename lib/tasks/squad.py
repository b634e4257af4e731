"""
Read SQuAD 1.1, cut its paragraphs into windows, and turn predicted spans into answers.
"""
import collections
from dataclasses import dataclass

import numpy as np

from lib.common.errors import UserError
from lib.common.files import read_json
from lib.corpus.vocabulary import special_ids, tokenize
from lib.tasks.examples import Examples


@dataclass
class Question:
    id: str
    text: str
    context: str  # the paragraph
    answers: list  # (index of the first character, text)


def read_squad(path, answered=True):
    """Read the Questions of a SQuAD 1.1 file; UserError if it is none. With `answered` each has
    answers, at their places in the paragraph. No two have the same id."""
    articles = read_json(path).get("data")
    try:
        questions = [Question(qa["id"], qa["question"], paragraph["context"],
                              [(answer["answer_start"], answer["text"])
                               for answer in (qa["answers"] if answered else ())])
                     for article in articles for paragraph in article["paragraphs"]
                     for qa in paragraph["qas"]]
        for question in questions:
            check_question(question, answered)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not a file of SQuAD 1.1: {type(error).__name__}: "
                        f"{error}") from None
    if not questions:
        raise UserError(f"{path}: no question in it")
    [(shared, count)] = collections.Counter(question.id for question in questions).most_common(1)
    if count > 1:
        raise UserError(f"{path}: {count} questions have the id {shared!r}: predictions are "
                        "told apart by id, give each question its own")
    return questions


def check_question(question, answered):
    """Raise an error unless all parts are text and the paragraph has the answer."""
    for text in (question.id, question.text, question.context):
        if not isinstance(text, str):
            raise TypeError(f"question {question.id!a}: {text!a:.40} is no text")
        text.encode()  # raises if there is half a character in it
    found = [type(start) is int and start >= 0 and text and question.context.startswith(text, start)
             for start, text in question.answers]
    if answered and not (found and all(found)):
        raise ValueError(f"question {question.id} has no answer in its paragraph")


@dataclass
class Windows(Examples):
    """Overlapping windows of paragraphs: [CLS] question [SEP] tokens of the paragraph [SEP]."""
    questions: list  # all Questions of the split
    question_of_window: list  # the Question of each window
    offsets: list  # characters of each window's tokens: (tokens, 2), begin and end
    starts: np.ndarray  # (n, 2) an answer may start at starts[n, 0] to starts[n, 1] - 1


def make_windows(tokenizer, questions, max_len, stride, what="encoding"):
    """Cut paragraphs into Windows of up to max_len tokens that begin `stride` tokens apart. A
    window's label is the first answer, or (0, 0), which is [CLS], if not all of it is inside
    (Devlin et al.)."""
    special = special_ids(tokenizer)
    heads = tokenize(tokenizer, [question.text for question in questions], what)
    contexts = list(dict.fromkeys(question.context for question in questions))
    paragraphs = {}
    for context, encoding in zip(contexts, tokenize(tokenizer, contexts, what)):
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        paragraphs[context] = encoding.ids, offsets
    rows = []
    for question, encoding in zip(questions, heads):
        head = [special.cls, *encoding.ids[:min(64, max_len // 2)], special.sep]
        tokens, offsets = paragraphs[question.context]
        character, answer = question.answers[0] if question.answers else (0, "")
        first = np.searchsorted(offsets[:, 1], character, side="right")
        last = np.searchsorted(offsets[:, 0], character + len(answer)) - 1

        room = max_len - len(head) - 1
        step = min(stride, room)
        begins = range(0, max(0, len(tokens) - room) + step, step)
        best = max_context(begins, room, len(tokens))
        for n, begin in enumerate(begins):
            end = begin + room
            shift = len(head) - begin  # from a paragraph's token to its position
            ids = np.array([*head, *tokens[begin:end], special.sep], np.uint16)
            is_whole = begin <= first <= last < end
            label = [first + shift, last + shift] if is_whole else [0, 0]
            starts = np.searchsorted(best, [n, n + 1]) + shift
            rows.append((ids, len(head), label, question, offsets[begin:end], starts))
    ids, first_length, labels, question_of_window, offsets, starts = zip(*rows)
    return Windows(ids, np.array(first_length), np.array(labels), special.pad, questions,
                   question_of_window, offsets, np.array(starts))


def max_context(begins, room, total):
    """Choose the window that has most context for each of `total` tokens.

    The context is min(tokens to the left, tokens to the right) + 0.01 * length, as in Devlin et
    al.'s run_squad.py. Windows hold `room` tokens from each of `begins`. Returns the windows'
    numbers (total,), in ascending order."""
    position, begin = np.arange(total), np.array(begins)[:, None]
    end = np.minimum(begin + room, total)
    context = np.minimum(position - begin, end - 1 - position) + 0.01 * (end - begin)
    inside = (begin <= position) & (position < end)
    return np.where(inside, context, -np.inf).argmax(0)


def best_answers(windows, predictions):
    """Answer each question with the best span over its windows. predictions: of their spans.
    Returns {question id: text} and {question id: score}. Without a span the text is empty."""
    ids = [question.id for question in windows.questions]
    texts, best = dict.fromkeys(ids, ""), dict.fromkeys(ids, -np.inf)
    scores, spans = predictions[:, 0], predictions[:, 1:].astype(int)
    for n in np.argsort(scores, kind="stable"):  # the best one comes last
        if scores[n] > -np.inf:
            question = windows.question_of_window[n]
            (start, _), (_, end) = windows.offsets[n][spans[n] - windows.first_length[n]]
            texts[question.id] = question.context[start:end].strip()
            best[question.id] = scores[n]
    return texts, best
