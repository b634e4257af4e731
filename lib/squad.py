"""
Read SQuAD 1.1, cut its paragraphs into windows, and turn predicted spans into answers.
"""
import collections
from dataclasses import dataclass

import numpy as np

from lib.errors import UserError
from lib.files import read_json
from lib.tokenizer import special_ids, tokenize


@dataclass
class Examples:
    """Inputs of a model: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""
    ids: list  # token ids of each example, uint16 (length,)
    first_length: np.ndarray  # (n,) length of [CLS] a [SEP], which has token type 0
    labels: np.ndarray | None  # (n,) classes or scores; (n, 2) first and last token for SQuAD
    pad_id: int

    def __post_init__(self):
        self.lengths = np.array([len(ids) for ids in self.ids])

    def pad(self, index, device="cpu"):
        """Pad the examples `index` to the longest. Returns arrays (batch, time): ids, token_types
        and, if anything is padded, a mask that is True at real tokens."""
        multiple = 8 if str(device).startswith("cuda") else 1  # for tensor cores
        lengths = self.lengths[index][:, None]
        position = np.arange(-(-lengths.max(initial=1) // multiple) * multiple)
        mask = position < lengths
        ids = np.full(mask.shape, self.pad_id, np.int64)
        ids[mask] = np.concatenate([ids[:0, 0], *(self.ids[n] for n in index)])
        after = position >= self.first_length[index][:, None]
        batch = {"ids": ids, "token_types": after.astype(np.int64)}
        return batch if mask.all() else {**batch, "mask": mask}  # faster without a mask


def encode_examples(tokenizer, texts, labels, max_len, what="encoding"):
    """Encode tuples of one or two texts as Examples. The longer of two texts loses its last token
    until there are max_len tokens (Devlin et al.)."""
    special = special_ids(tokenizer)
    encodings = tokenize(tokenizer, [text for row in texts for text in row], what)
    ids, first_length = [], []
    for row in texts:
        pieces = [next(encodings).ids for _ in row]
        while sum(map(len, pieces)) > max_len - 1 - len(pieces):
            max(reversed(pieces), key=len).pop()  # the second, if both are equally long
        joined = [token for piece in pieces for token in [*piece, special.sep]]
        ids.append(np.array([special.cls, *joined], np.uint16))
        first_length.append(len(pieces[0]) + 2)
    return Examples(ids, np.array(first_length), labels, special.pad)


def batches_by_length(lengths, size, rng=None):
    """Group examples of similar lengths into batches, as arrays of indices. Without a numpy
    Generator they are sorted. With one they are in random order, sorted within 64 at a time."""
    n = len(lengths)
    order, bucket = (np.arange(n), n) if rng is None else (rng.permutation(n), 64 * size)
    order = order[np.lexsort((lengths[order], np.arange(n) // bucket))]
    batches = np.split(order, range(size, n, size))
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]


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
