"""
Downstream tasks: GLUE, SQuAD 1.1 and your own TSV files, as token ids, and their official scores.

>>> task = find("sst2")                             # data/glue/SST-2
>>> texts, labels = read(task, "train")
>>> examples = encode(tokenizer, texts, labels, max_len=128)
"""
import json
import re
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import Progress, UserError, run_script
from data import special_tokens

GLUE = {  # name: folder, classes ([] for a score), metrics (the first one picks the best epoch)
    "cola": ("CoLA", ["0", "1"], ["matthews_correlation", "accuracy"]),
    "sst2": ("SST-2", ["0", "1"], ["accuracy"]),
    "mrpc": ("MRPC", ["0", "1"], ["accuracy", "f1"]),
    "stsb": ("STS-B", [], ["pearson", "spearmanr"]),
    "qqp": ("QQP", ["0", "1"], ["accuracy", "f1"]),
    "mnli": ("MNLI", ["contradiction", "entailment", "neutral"], ["accuracy"]),
    "qnli": ("QNLI", ["entailment", "not_entailment"], ["accuracy"]),
    "rte": ("RTE", ["entailment", "not_entailment"], ["accuracy"]),
}
# The columns of texts and labels in the official files
TEXTS = (("question", "sentence"), ("question1", "question2"), ("sentence1", "sentence2"),
         ("#1 String", "#2 String"), ("sentence",))
LABELS = ("gold_label", "label", "is_duplicate", "Quality", "score")
COLA = ["source", "label", "star", "sentence"]  # its train.tsv and dev.tsv have no header


@dataclass
class Task:
    name: str
    folder: Path
    labels: list | None  # classes, [] for a score, None until the training data are read
    metrics: list  # the first one picks the best epoch
    dev: dict  # {suffix of the metrics' names: split}
    test: dict  # {name of the submission: split}

    def file(self, split):
        """The TSV file of a split; of MRPC maybe as Microsoft publishes it, with dev in train."""
        path = self.folder / f"{split}.tsv"
        other = self.folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
        return other if self.name == "mrpc" and not path.exists() else path


def find(name, root="data"):
    """The Task called `name`: one of GLUE ("sst2" or "SST-2"), 'squad', 'docs' (made if missing),
    or a folder of your own with train.tsv, dev.tsv and maybe test.tsv."""
    key, folder = name_of(name), Path(name or "?")
    metrics = ["f1", "exact_match"] if key == "squad" else ["accuracy"]
    title, labels, metrics = GLUE.get(key, (folder.name, None, metrics))
    dev, test = {"": "dev"}, {title: "test"}
    hint = f"expected docs, squad, {', '.join(GLUE)}, or a folder of your own"
    if key in GLUE:
        folder, hint = Path(root, "glue", title), f"python prepare_data.py glue {title}"
    if key == "mnli":
        dev = {"": "dev_matched", "_mm": "dev_mismatched"}
        test = {"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}
    if name == "squad":
        folder, hint = Path(root, "squad"), "python prepare_data.py squad"
    if name == "docs":
        folder = Path(root, "docs_task")
        if not folder.exists():
            run_script("prepare_data.py", "docs_task")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: {hint}")
    return Task(key, folder, labels, metrics, dev, test)


def name_of(task):
    """The short name of a task: "sst2" for "SST-2", the last part of a path, or "own_rte" if that
    is the name of a GLUE task."""
    key, last = (name.lower().replace("-", "") for name in (task, Path(task).name))
    return key if key in GLUE else f"own_{last}" if last in GLUE else Path(task).name


def read(task, split):
    """A split's texts, each a tuple of one or two, and labels: classes or scores, None for a test
    split. Quotes are ordinary characters.

    A malformed row is a UserError with file and line, and so is a blank line between rows: without
    it the rows after it would have other numbers. In training data such rows are left out and
    counted (QQP has some), if they are at most one in a hundred. A task of your own takes its
    classes from its training data: read them first."""
    path, is_test = task.file(split), split.startswith("test")
    lines = read_lines(path)
    columns = COLA if task.name == "cola" and not is_test else next(lines, (1, []))[1]
    needed = next((names for names in TEXTS if set(names) <= set(columns)), None)
    target = next((name for name in LABELS if name in columns and not is_test), None)
    if needed is None or not (target or is_test):
        raise UserError(f"{path}:1: columns {columns}: expected a header with sentence, or "
                        "sentence1 and sentence2, and label (or score, a number)")
    if path.name == "msr_paraphrase_train.txt":
        dev_ids = [ids for _, ids in read_lines(task.folder / "mrpc_dev_ids.tsv")]
        lines = [row for row in lines if (row[1][1:3] in dev_ids) == (split == "dev")]
    if task.labels is None and target == "score":
        task.labels, task.metrics = [], GLUE["stsb"][2]
    texts, labels, bad = [], [], []
    for number, fields in lines:
        row = dict(zip(columns, fields))
        try:
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, expected {len(columns)}")
            labels.append(parse_label(task, row[target]) if target else None)
            texts.append(tuple(row[name] for name in needed))
        except ValueError as error:
            bad.append(f"{path}:{number}: {error}")
    if bad:
        count = f"{len(bad):,} of {len(bad) + len(texts):,} rows"
        if split != "train" or 100 * len(bad) > len(bad) + len(texts):
            raise UserError(f"{bad[0]} ({count} are malformed)")
        print(f"{bad[0]}; {count} left out")
    if not texts:
        raise UserError(f"{path}: no row in it")
    if not target:
        return texts, None
    if task.labels == []:
        return texts, np.array(labels, np.float32)  # MPS has no float64
    if task.labels is None:
        task.labels = sorted(set(labels))
        if len(task.labels) == 1:
            raise UserError(f"{path}: every label is {labels[0]!r}")
    return texts, np.array([task.labels.index(label) for label in labels])


def row_names(task, split):
    """What a submission calls each row of a test split: as its own column `index` does (QQP's is
    `id`), else its number, counted from 0."""
    (_, columns), *lines = read_lines(task.file(split))
    own = next((columns.index(name) for name in ("index", "id") if name in columns), None)
    return [str(n) if own is None else fields[own] for n, (_, fields) in enumerate(lines)]


def read_lines(path):
    """(line number, fields) of each line of a TSV file; blank lines at its end are not read."""
    if not path.exists() or path.is_dir():
        raise UserError(f"{path}: no such file")
    blank = []
    with path.open("rb") as lines:  # as bytes: a text may have line separators other than "\n"
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: {line[error.start]:#04x} at byte {error.start} "
                                "of the line is not UTF-8") from None
            if not text:
                blank.append((number, [""]))
                continue
            yield from blank
            blank = []
            yield number, text.split("\t")


def tsv(rows):
    """Rows as the text of a TSV file; a tab or line break in a text becomes a space."""
    return "".join("\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row) + "\n"
                   for row in rows)


def parse_label(task, text):
    """A score or the name of a class, any name while the classes are unknown."""
    if task.labels == [] and np.isfinite(float(text)):
        return float(text)
    if text in (task.labels or ()) or (task.labels is None and text.strip()):
        return text
    expected = task.labels or ["a number" if task.labels == [] else "a class"]
    raise ValueError(f"label {text!r}: expected {', '.join(expected)}")


@dataclass
class Examples:
    """Inputs of a model: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""
    ids: list  # the token ids of each example, uint16 (length,)
    first: np.ndarray  # (n,) how many tokens of each have token type 0
    labels: np.ndarray | None  # (n,) classes or scores; of SQuAD (n, 2), a span's start and end

    def __post_init__(self):
        self.lengths = np.array([len(ids) for ids in self.ids])

    def pad(self, index, pad_id, multiple=1):
        """The examples `index` as a batch, padded to the longest, rounded up to a multiple: arrays
        ids and token_types (batch, time), and mask, True at real tokens, if there is padding."""
        lengths = self.lengths[index][:, None]
        position = np.arange(-(-lengths.max() // multiple) * multiple)
        mask = position < lengths
        ids = np.full(mask.shape, pad_id, np.int64)
        ids[mask] = np.concatenate([self.ids[n] for n in index])
        after = position >= self.first[index][:, None]
        batch = {"ids": ids, "token_types": after.astype(np.int64)}
        return batch if mask.all() else {**batch, "mask": mask}  # without one, attention is faster


def special_ids(tokenizer):
    """The ids of padding, unknown, [CLS], [SEP] and [MASK]."""
    return tuple(map(tokenizer.token_to_id, special_tokens(tokenizer.get_vocab())))


def tokenize(tokenizer, texts, what):
    """The Encodings of texts, one by one, without special tokens."""
    for n in Progress(range(0, len(texts), 8192), what):
        yield from tokenizer.encode_batch(texts[n:n + 8192], add_special_tokens=False)


def encode(tokenizer, texts, labels, max_len, what="encoding"):
    """Examples of what read() returns, cut to max_len tokens: while there are more, the longer of
    two texts loses its last one (Devlin et al.)."""
    _, _, cls, sep, _ = special_ids(tokenizer)
    encodings = tokenize(tokenizer, [text for row in texts for text in row], what)
    ids, first = [], []
    for row in texts:
        parts = [next(encodings).ids for _ in row]
        while sum(map(len, parts)) > max_len - 1 - len(parts):
            max(reversed(parts), key=len).pop()  # of two equal ones the second
        ids.append(np.array([cls, *(token for part in parts for token in [*part, sep])], np.uint16))
        first.append(len(parts[0]) + 2)
    return Examples(ids, np.array(first), labels)


def batches(lengths, size, rng=None):
    """Batches of examples of similar lengths, as arrays of indices: sorted by length, or, with a
    numpy Generator, in random order, sorted within 64 batches at a time."""
    n = len(lengths)
    order, bucket = (np.arange(n), n) if rng is None else (rng.permutation(n), 64 * size)
    order = order[np.lexsort((lengths[order], np.arange(n) // bucket))]
    parts = np.split(order, range(size, n, size))
    return parts if rng is None else [parts[i] for i in rng.permutation(len(parts))]


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


def windows(tokenizer, questions, max_len, stride, train=False, what="encoding"):
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


def examples(task, split, tokenizer, max_len, stride):
    """The Examples of a split of any task; of SQuAD its Windows, and a report of the answers."""
    path = f"{task.folder}/{split}"
    if task.name != "squad":
        return encode(tokenizer, *read(task, split), max_len, path)
    questions = read_squad(f"{path}-v1.1.json")
    result, statuses = windows(tokenizer, questions, max_len, stride, split == "train", path)
    labels = ", ".join(f"{len(ids):,} {status} (the first: {ids[0]})"
                       for status, ids in statuses.items())
    print(f"{path}: {len(questions):,} questions, {len(result.ids):,} windows, {labels}")
    return result


def answers(windows, scores, spans):
    """{question id: the text of the best span over its windows, '' if there is none}. scores: (n,),
    of each window, -inf for none; spans: (n, 2), start and end in its ids."""
    texts = {question.id: "" for question in windows.questions}
    for n in np.argsort(scores, kind="stable"):  # the best one comes last
        if scores[n] > -np.inf:
            question = windows.question[n]
            (start, _), (_, end) = windows.offsets[n][spans[n] - windows.first[n]]
            texts[question.id] = question.context[start:end].strip()
    return texts


def score_squad(questions, predictions):
    """Exact match and F1 in percent, the best over a question's answers, as the official
    evaluate-v1.1.py computes them. predictions: {question id: text}."""
    exact = f1 = 0.0
    for question in questions:
        predicted = normalize(predictions[question.id])
        references = [normalize(text) for _, text in question.answers]
        exact += predicted in references
        f1 += max(2 * (Counter(predicted) & Counter(words)).total()
                  / max(1, len(predicted) + len(words)) for words in references)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalize(answer):
    """The words in lower case, without ASCII punctuation and articles."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def pearson(x, y):
    """Correlation; nan if x or y is constant."""
    return np.corrcoef(x, y)[0, 1] if np.ptp(x) and np.ptp(y) else np.nan


def ranks(x):
    """Counted from 1; equal values share their mean rank."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


METRICS = {  # of labels x and predictions y, arrays (n,)
    "accuracy": lambda x, y: (x == y).mean(),
    "f1": lambda x, y: 2 * (x @ y) / max(1, (x + y).sum()),  # of class 1; 0 if in neither
    "matthews_correlation": lambda x, y: np.nan_to_num(pearson(x, y)),  # 0 if one is constant
    "pearson": pearson,
    "spearmanr": lambda x, y: pearson(ranks(x), ranks(y)),
}
