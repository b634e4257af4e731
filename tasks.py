"""
Downstream tasks, GLUE, SQuAD 1.1 and TSV files of your own: their files as token ids, their scores
as officially scored. finetune.py trains on them; measure.py looks at memories that read them.

>>> task = find("sst2")                             # data/glue/SST-2
>>> rows = read(task, "train")
>>> examples = encode(tokenizer, [row.texts for row in rows], max_len=128)
"""
import json
import re
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs import UserError
from prepare_data import Progress, prepare_docs_task, special_tokens

NLI = ["contradiction", "entailment", "neutral"]
GLUE = {  # name: folder, labels ([]: it is a score), metrics; the first tells the best epoch
    "cola": ("CoLA", ["0", "1"], ["matthews_correlation", "accuracy"]),
    "sst2": ("SST-2", ["0", "1"], ["accuracy"]),
    "mrpc": ("MRPC", ["0", "1"], ["accuracy", "f1"]),
    "stsb": ("STS-B", [], ["pearson", "spearmanr"]),
    "qqp": ("QQP", ["0", "1"], ["accuracy", "f1"]),
    "mnli": ("MNLI", NLI, ["accuracy"]),
    "qnli": ("QNLI", NLI[1:2] + ["not_entailment"], ["accuracy"]),
    "rte": ("RTE", NLI[1:2] + ["not_entailment"], ["accuracy"]),
}
# What the official headers call the texts, and what is to be predicted.
TEXTS = (("question", "sentence"), ("question1", "question2"), ("sentence1", "sentence2"),
         ("#1 String", "#2 String"), ("sentence",))
TARGETS = ("gold_label", "label", "is_duplicate", "Quality", "score")
BATCH = 2**13  # texts tokenized at once


@dataclass
class Task:
    name: str
    folder: Path
    labels: list | None  # names of the classes, [] of a score, None until training data were read
    metrics: list  # the first tells which epoch is the best
    dev: dict  # what a metric's name ends in: the split
    test: dict  # name of the submission: the split


def find(name, root="data"):
    """The Task called `name`: one of GLUE (as "sst2" or "SST-2"), 'squad', 'docs' (made on the
    spot), or a folder of yours: train.tsv, dev.tsv, maybe test.tsv. UserError where it is not."""
    dev, test, labels, metrics = {"": "dev"}, {}, None, ["accuracy"]
    if name_of(name) in GLUE:
        name = name_of(name)
        title, labels, metrics = GLUE[name]
        folder, test = Path(root, "glue", title), {title: "test"}
        if name == "mnli":
            dev = {"": "dev_matched", "_mm": "dev_mismatched"}
            test = {"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}
    elif name_of(name) == "squad":
        folder = Path(root, "squad") if name == "squad" else Path(name)
        metrics = ["f1", "exact_match"]
    elif name == "docs":
        folder, test = Path(root, "docs_task"), {"docs": "test"}
        if not folder.exists():
            prepare_docs_task(root)
    else:
        folder, test = Path(name or "?"), {Path(name).name: "test"}
    if not folder.is_dir():
        command = f"glue {folder.name}" if name in GLUE else "squad" if name == "squad" else ""
        raise UserError(f"{folder}: no such folder: " + (
            f"python prepare_data.py {command}" if command else
            f"expected docs, squad, {', '.join(GLUE)}, or a folder of yours"))
    return Task(name_of(name), folder, labels, metrics, dev, test)


def name_of(task):
    """What a task is called in tables: "sst2" for "SST-2"; of a path the last part, "own_rte" where
    GLUE has a task called so."""
    key, last = (name.lower().replace("-", "") for name in (task, Path(task).name))
    return key if key in GLUE else f"own_{last}" if last in GLUE else Path(task).name


@dataclass
class Row:
    line: int  # in its file, counted from 1
    texts: tuple  # one or two
    label: int | float | None  # a class, a score; None in a test split


def read(task, split):
    """The rows of a split, Row by Row; quotes are text.

    In training data a row with a wrong number of fields or an impossible label is counted and left
    out (QQP has such), unless they are more than one in a hundred; elsewhere it is a UserError with
    file and line. The labels of a task of your own are those of its training data: read them first.
    """
    path, names, held_out, rows, bad = file(task, split), None, set(), [], []
    if task.name == "cola" and split != "test":
        names = ["source", "label", "star", "sentence"]  # these two have no header
    if path.name == "msr_paraphrase_train.txt":
        held_out = {tuple(ids) for _, ids in _lines(task.folder / "mrpc_dev_ids.tsv")}
    lines = _lines(path)
    names = names or next(lines, (1, []))[1]
    texts = next((columns for columns in TEXTS if set(columns) <= set(names)), None)
    target = next((column for column in TARGETS if column in names), None)
    if texts is None or target is None and not split.startswith("test"):
        raise UserError(f"{path}:1: columns {names}: expected a header with sentence, or sentence1 "
                        "and sentence2, and label (or score, a number)")
    target = None if split.startswith("test") else target
    if task.labels is None and target == "score":
        task.labels, task.metrics = [], GLUE["stsb"][2]
    for line, fields in lines:
        try:
            if len(fields) != len(names):
                raise ValueError(f"{len(fields)} fields, expected {len(names)}")
            row = dict(zip(names, fields, strict=True))
            if held_out and (split == "dev") != ((row["#1 ID"], row["#2 ID"]) in held_out):
                continue
            label = _label(task, row[target]) if target else None
            rows.append(Row(line, tuple(row[column] for column in texts), label))
        except ValueError as error:
            bad.append(f"{path}:{line}: {error}")
            if split != "train":
                raise UserError(bad[0]) from None
    if len(bad) > max(1, len(rows) / 100) or not rows:
        raise UserError(f"{bad[0]} ({len(bad):,} of {len(bad) + len(rows):,} rows are malformed)"
                        if bad else f"{path}: no row in it")
    if bad:
        print(f"{bad[0]}; {len(bad):,} of {len(bad) + len(rows):,} rows left out")
    if task.labels is None:
        task.labels = sorted({row.label for row in rows})
        if len(task.labels) == 1:
            raise UserError(f"{path}: every label is {task.labels[0]!r}: nothing to learn")
        for row in rows:
            row.label = task.labels.index(row.label)
    return rows


def file(task, split):
    """The TSV file of a split."""
    path = task.folder / f"{split}.tsv"
    if task.name == "mrpc" and not path.exists():  # as Microsoft publishes it: dev is in train
        return task.folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    return path


def _lines(path):
    """(number, fields) of the lines of a TSV file that are not blank."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with path.open("rb") as lines:  # only "\n" ends one: texts have other separators in them
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: {raw[error.start]:#04x} at byte {error.start} "
                                "of the line is not UTF-8") from None
            if line:
                yield number, line.split("\t")


def _label(task, text):
    """A class or a score from its text; the text itself while the labels are not known yet."""
    if task.labels is None:
        if not text.strip():
            raise ValueError("no label")
        return text
    if task.labels:
        if text not in task.labels:
            raise ValueError(f"label {text!r} is none of {', '.join(task.labels)}")
        return task.labels.index(text)
    score = float(text)
    if not np.isfinite(score):
        raise ValueError(f"{text} is no score")
    return score


@dataclass
class Examples:
    """Inputs of a model: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""
    ids: list  # of each, its token ids, uint16 (length,)
    first: np.ndarray  # (n,) how many of its tokens are of type 0
    labels: np.ndarray  # (n,) classes or scores; (n, 2) where the span starts and ends in ids

    def __post_init__(self):
        self.lengths = np.array([len(ids) for ids in self.ids])

    def pad(self, index, pad_id, multiple=1):
        """Examples `index` as one batch, padded to the longest of them (then to a multiple):
        ids and token types, int64 (batch, time), and lengths (batch,)."""
        lengths = self.lengths[index]
        ids = np.full((len(index), -(-lengths.max() // multiple) * multiple), pad_id, np.int64)
        for row, n in zip(ids, index, strict=True):
            row[:self.lengths[n]] = self.ids[n]
        types = np.arange(ids.shape[1]) >= self.first[index][:, None]
        return ids, types.astype(np.int64), lengths


def special_ids(tokenizer):
    """Of padding, unknown, [CLS], [SEP] and [MASK]."""
    return tuple(map(tokenizer.token_to_id, special_tokens(tokenizer.get_vocab())))


def encode(tokenizer, rows, max_len, what="encoding"):
    """Examples of Rows, of max_len tokens at most: from the longer of two texts tokens are dropped
    at the end until both fit (Devlin et al.)."""
    _, _, cls, sep, _ = special_ids(tokenizer)
    progress, ids, first = Progress(what, sum(len(t) for row in rows for t in row.texts)), [], []
    for texts in _chunks([row.texts for row in rows], progress):
        columns = [tokenizer.encode_batch_fast(column, add_special_tokens=False)
                   for column in map(list, zip(*texts, strict=True))]
        for pieces in zip(*columns, strict=True):
            a, b = pieces[0].ids, pieces[1].ids if len(pieces) == 2 else []
            while len(a) + len(b) > max_len - 1 - len(pieces):
                (a if len(a) > len(b) else b).pop()
            tail = [*b, sep] if len(pieces) == 2 else []
            ids.append(np.array([cls, *a, sep, *tail], np.uint16))
            first.append(len(a) + 2)
    labels = np.array([row.label for row in rows])
    if labels.dtype == np.float64:
        labels = labels.astype(np.float32)  # MPS has no other
    return Examples(ids, np.array(first), labels)


def _chunks(texts, progress):
    for at in range(0, len(texts), BATCH):
        yield texts[at:at + BATCH]
        progress(sum(len("".join(text)) for text in texts[at:at + BATCH]))


def batches(lengths, size, rng=None):
    """Lists of examples that are of about the same length, as arrays of their numbers. With a numpy
    Generator in a random order: sorted by length within 64 batches at a time; without one by
    length."""
    n = len(lengths)
    order, bucket = (np.arange(n), n) if rng is None else (rng.permutation(n), 64 * size)
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in
                            np.split(order, range(bucket, n, bucket))])
    found = np.split(order, range(size, n, size))
    if rng is not None:
        found = [found[i] for i in rng.permutation(len(found))]
    return found


@dataclass
class Question:
    id: str
    text: str
    context: int  # its number
    answers: list  # (first character, text)


def read_squad(path):
    """(contexts, Questions) of a SQuAD 1.1 file; UserError where it is not one."""
    contexts, questions = [], []
    try:
        for article in json.loads(Path(path).read_text(encoding="utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    answers = [(a["answer_start"], a["text"]) for a in qa["answers"]]
                    if not answers:
                        raise UserError(f"{path}: question {qa['id']} has no answer: SQuAD 1.1 is "
                                        "expected, is this 2.0?")
                    questions.append(Question(qa["id"], qa["question"], len(contexts), answers))
                contexts.append(paragraph["context"])
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: python prepare_data.py squad") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: truncated or damaged at column {error.colno}: "
                        f"{error.msg}") from None
    except (UnicodeDecodeError, LookupError, TypeError) as error:
        after = f" after question {questions[-1].id}" if questions else ""
        raise UserError(f"{path}: not a file of SQuAD 1.1{after}: {error!r}") from None
    return contexts, questions


@dataclass
class Windows(Examples):
    """Each paragraph in overlapping windows: [CLS] question [SEP] part of the paragraph [SEP]."""
    contexts: list  # the paragraphs' texts
    questions: list  # of Question
    question: np.ndarray  # (n,) the number of each window's question
    begin: np.ndarray  # (n,) the paragraph's token that each window's part begins with
    offsets: list  # of each context, its tokens' first character and the one after, (tokens, 2)


def windows(tokenizer, contexts, questions, max_len, stride, train=False, what="encoding"):
    """Windows of max_len tokens whose parts begin `stride` tokens apart, labelled with the first
    answer where they have all of it, else with [CLS], (0, 0) (Devlin et al.). With `train` a
    question whose answer is not in the paragraph where the file says has no window. Returns them
    and {what became of an answer: the questions' ids}."""
    _, _, cls, sep, _ = special_ids(tokenizer)
    texts, fates = [question.text for question in questions], {}
    progress = Progress(what, sum(map(len, contexts)) + sum(map(len, texts)))
    encoded = [piece for part in _chunks(contexts, progress)
               for piece in tokenizer.encode_batch(part, add_special_tokens=False)]
    parts = [np.array(piece.ids, np.uint16) for piece in encoded]
    offsets = [np.array(piece.offsets, np.int32).reshape(-1, 2) for piece in encoded]
    asked = [piece.ids[:min(64, max_len // 2)] for part in _chunks(texts, progress)
             for piece in tokenizer.encode_batch_fast(part, add_special_tokens=False)]
    ids, first, labels, of, begins = [], [], [], [], []
    for n, (question, query) in enumerate(zip(questions, asked, strict=True)):
        part, head = parts[question.context], [cls, *query, sep]
        start, end, fate = _span(contexts[question.context], offsets[question.context],
                                 *question.answers[0])
        room = max_len - len(head) - 1
        step, labelled = min(stride, room), False
        for begin in range(0, max(0, len(part) - room) + step, step):
            if train and end < 0:
                break
            inside = end >= 0 and begin <= start and end < begin + room
            labelled |= inside
            ids.append(np.array([*head, *part[begin:begin + room], sep], np.uint16))
            first.append(len(head))
            shift = len(head) - begin
            labels.append((start + shift, end + shift) if inside else (0, 0))
            of.append(n)
            begins.append(begin)
        fate = fate if labelled or end < 0 else "in no window whole"
        fates.setdefault(fate, []).append(question.id)
    return Windows(ids, np.array(first), np.array(labels), contexts, questions, np.array(of),
                   np.array(begins), offsets), fates


def examples(task, split, tokenizer, max_len, stride):
    """Examples of a split of any task, SQuAD's in Windows; what was left out is printed."""
    name = f"{task.folder}/{split}"
    if task.name != "squad":
        return encode(tokenizer, read(task, split), max_len, name)
    found, fates = windows(tokenizer, *read_squad(f"{name}-v1.1.json"), max_len, stride,
                           split == "train", name)
    print(f"{name}-v1.1.json: {len(found.questions):,} questions, {len(found.ids):,} windows, "
          "labels " + ", ".join(f"{len(ids):,} {fate}"
                                + f" (the first: {ids[0]})" * (fate != "exact")
                                for fate, ids in fates.items()))
    return found


def _span(context, offsets, at, answer):
    """First and last token of an answer at character `at`, or 0 and -1; and how it lies: exact,
    cutting a token that WordPiece does not split there, or not at all."""
    if context[at:at + len(answer)] != answer or not answer:
        return 0, -1, "not at its offset"
    start = int(np.searchsorted(offsets[:, 1], at, side="right"))
    end = int(np.searchsorted(offsets[:, 0], at + len(answer))) - 1
    if end < start:
        return 0, -1, "without a token"
    exact = context[offsets[start, 0]:offsets[end, 1]].strip() == answer  # GPT-2's have spaces
    return start, end, "exact" if exact else "cuts a token"


def answers(windows, scores, spans):
    """{question id: text} of the best span over all windows of each question, '' where no window
    has one. scores: (n,), -inf for none; spans: (n, 2), places in the windows' ids. The text is cut
    out of the paragraph itself."""
    found = {question.id: "" for question in windows.questions}
    for n in np.argsort(scores, kind="stable"):  # the best one comes last
        if scores[n] > -np.inf:
            question = windows.questions[windows.question[n]]
            start, end = spans[n] - windows.first[n] + windows.begin[n]
            offsets, text = windows.offsets[question.context], windows.contexts[question.context]
            found[question.id] = text[offsets[start, 0]:offsets[end, 1]].strip()
    return found


def score_squad(questions, predictions):
    """Exact match and F1 in percent, the best over a question's answers, as the official
    evaluate-v1.1.py takes them. predictions: {question id: text}."""
    exact = f1 = 0.0
    for question in questions:
        ours = normalize(predictions[question.id])
        references = [normalize(text) for _, text in question.answers]
        exact += max(ours == reference for reference in references)
        f1 += max(word_f1(ours.split(), reference.split()) for reference in references)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalize(answer):
    """Lower case, without ASCII punctuation, articles and superfluous white space."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(ours, reference):
    common = sum((Counter(ours) & Counter(reference)).values())
    return 2 * common / (len(ours) + len(reference)) if common else 0.0


def accuracy(labels, predictions):
    return float((labels == predictions).mean())


def f1(labels, predictions):
    """Of class 1; 0 where there is none of it."""
    hits, either = ((labels == 1) & (predictions == 1)).sum(), (labels == 1).sum()
    return float(2 * hits / max(1, either + (predictions == 1).sum()))


def matthews_correlation(labels, predictions):
    """Of two classes; 0 where labels or predictions are all the same."""
    found = pearson(labels, predictions)
    return 0.0 if np.isnan(found) else found


def pearson(x, y):
    """Correlation; nan where x or y is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = ((a - a.mean()) / np.linalg.norm(a - a.mean()) for a in (np.float64(x), np.float64(y)))
    return float(np.clip(x @ y, -1, 1))


def spearmanr(x, y):
    """Correlation of the ranks; those that are equal share their mean rank."""
    def ranks(a):
        _, place, count = np.unique(a, return_inverse=True, return_counts=True)
        return (count.cumsum() - (count - 1) / 2)[place]
    return pearson(ranks(x), ranks(y))


METRICS = {f.__name__: f for f in (accuracy, f1, matthews_correlation, pearson, spearmanr)}
