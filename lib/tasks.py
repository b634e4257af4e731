"""
Read the tasks (GLUE, SQuAD 1.1, folders of your own), encode them, predict and score.

>>> task = find_task("sst2")                        # data/glue/SST-2
>>> texts, labels = read_split(task, "train")
"""
import math
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lib.device import autocast, to_device
from lib.files import read_table
from lib.ranks import deal_batches, sum_over_ranks
from lib.settings import UserError
from lib.squad import best_answers, best_spans, make_windows, read_squad, score_squad
from lib.tokenizer import special_ids, tokenize
from model import SpanReader


class Task(NamedTuple):
    """Describe a task: what is official about it, and where its files are."""
    name: str
    folder: str | Path
    labels: list  # classes; [] for a score or a span
    metrics: list  # the first one picks the best epoch
    archives: list = ()  # the files to download
    dev: dict = MappingProxyType({"": "dev"})  # {suffix of metrics: split}
    texts: list = ("sentence1", "sentence2")  # columns: two of a pair, or one
    files: str = "{}.tsv"  # the name of a split's file
    reads_spans: bool = False  # answers are spans of a paragraph

    def file(self, split):
        """Return the path of a split's file."""
        return Path(self.folder, self.files.format(split))


YES_NO = ["0", "1"]
ENTAILED = ["entailment", "not_entailment"]
CORRELATIONS = ["pearson", "spearmanr"]
GLUE = [  # the columns of Table 4 from left to right, then the other tasks
    Task("mnli", "data/glue/MNLI", ["contradiction", "entailment", "neutral"], ["accuracy"],
         ["MNLI.zip"], dev={"": "dev_matched", "_mm": "dev_mismatched"}),
    Task("qqp", "data/glue/QQP", YES_NO, ["accuracy", "f1"], ["QQP-clean.zip"],
         texts=["question1", "question2"]),
    Task("qnli", "data/glue/QNLI", ENTAILED, ["accuracy"], ["QNLIv2.zip"],
         texts=["question", "sentence"]),
    Task("sst2", "data/glue/SST-2", YES_NO, ["accuracy"], ["SST-2.zip"], texts=["sentence"]),
    Task("cola", "data/glue/CoLA", YES_NO, ["matthews_correlation", "accuracy"], ["CoLA.zip"],
         texts=["sentence"]),
    Task("mrpc", "data/glue/MRPC", YES_NO, ["accuracy", "f1"],
         ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"],
         texts=["#1 String", "#2 String"], files="msr_paraphrase_train.txt"),  # dev is in it
    Task("stsb", "data/glue/STS-B", [], CORRELATIONS, ["STS-B.zip"]),
    Task("rte", "data/glue/RTE", ENTAILED, ["accuracy"], ["RTE.zip"]),
]
SQUAD = Task("squad", "data/squad", [], ["f1", "exact_match"],
             ["train-v1.1.json", "dev-v1.1.json"], texts=(), files="{}-v1.1.json",
             reads_spans=True)
TASKS = {task.name: task for task in [SQUAD, *GLUE]}

# Columns of texts and of labels, in the official files and in a person's own
TEXTS = ["question", "question1", "question2", "sentence1", "sentence2", "#1 String", "#2 String",
         "sentence"]
LABELS = ["gold_label", "is_duplicate", "Quality", "label", "score"]
COLA = ["source", "label", "star", "sentence"]  # its train.tsv and dev.tsv have no header


def find_task(name):
    """Find a Task: "sst2" or "SST-2", "squad", "docs_task", or the path of a folder.

    The train.tsv of a folder says whether the task has classes or, as in STS-B, scores. Prints how
    often each class occurs; UserError if the labels are hardly classes.
    """
    key = task_name(name)
    if key in TASKS and Path(TASKS[key].folder).is_dir():
        return TASKS[key]
    folder = Path("data/docs_task" if name == "docs_task" else name)
    path = folder / "train.tsv"
    if key in TASKS or not path.is_file():
        raise UserError(f"task = {name!r}: not there: expected docs_task, {', '.join(TASKS)} "
                        "(prepare_data.py makes them), or a folder with train.tsv and dev.tsv")
    rows = read_table(path)
    texts = find_columns(path, rows, TEXTS)
    column = find_columns(path, rows, LABELS)[0]
    if column == "score":
        return Task(key, folder, [], CORRELATIONS, texts=texts)
    counts = Counter(row[column] for row in rows)
    numbers = [label for label in counts if re.fullmatch(r"-?\d*\.\d+", label)]
    different = {label.strip() for label in counts} - {""}
    if len(different) < max(2, len(counts)) or len(numbers) > 20:
        raise UserError(f"{path}: labels {sorted(counts)[:20]}: expected two or more, none empty, "
                        "none that differs only by spaces at an end (numbers: in a column score)")
    print(path, "has the classes", dict(counts))
    return Task(key, folder, sorted(counts), ["accuracy"], texts=texts)


def task_name(name):
    """Return a task's short name: "sst2" for "SST-2", or the last part of a folder's path.

    A folder of your own with an official name becomes "own_rte".
    """
    key = name.lower().replace("-", "")
    own = Path(name).name
    if key in TASKS:
        return key
    return f"own_{own}" if own in TASKS else own


def read_split(task, split):
    """Read a split: its texts, tuples of one or two, and its labels.

    The labels are an array (n,) of classes, int64, or of scores, float32.
    """
    path = task.file(split)
    rows = read_table(path, COLA if task.name == "cola" else (), task.name == "qqp")
    if task.name == "mrpc":
        dev_table = read_table(path.with_name("mrpc_dev_ids.tsv"), ["#1 ID", "#2 ID"])
        dev_ids = {(row["#1 ID"], row["#2 ID"]) for row in dev_table}
        rows = [row for row in rows
                if ((row["#1 ID"], row["#2 ID"]) in dev_ids) == (split == "dev")]
    column = find_columns(path, rows, LABELS)[0]
    labels = []
    for number, row in enumerate(rows, 2):
        label = row[column]
        try:
            # a Fraction is never nan or infinite
            labels.append(task.labels.index(label) if task.labels else float(Fraction(label)))
        except (ValueError, ZeroDivisionError):
            expected = ", ".join(task.labels) or "a number"
            raise UserError(f"{path}:{number}: label {label!r}: expected {expected}") from None
    kind = np.int64 if task.labels else np.float32  # MPS has no float64
    return pick_texts(path, rows, task.texts), np.array(labels, kind)


def find_columns(path, rows, known):
    """Return the one or two of the `known` names that are columns of a file, else a UserError."""
    found = [name for name in known if name in rows[0]]
    if len(found) not in (1, 2):
        raise UserError(f"{path}:1: expected the columns sentence and label (or sentence1 and "
                        f"sentence2; or score), found {', '.join(rows[0])}")
    return found


def pick_texts(path, rows, names):
    """Return each row's texts, tuples of the columns `names`."""
    try:
        return [tuple(row[name] for name in names) for row in rows]
    except KeyError:
        raise UserError(f"{path}:1: expected the columns {names}, as in training") from None


@dataclass
class Example:
    """An input of a model: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""
    ids: np.ndarray  # (length,) token ids
    first_length: int  # tokens of [CLS] a [SEP], which have token type 0
    label: float | None  # a class or a score
    texts: tuple = ()  # a, or a and b


def encode_examples(tokenizer, texts, labels, max_len):
    """Encode tuples of one or two texts as Examples.

    The longer of two texts loses its last token until there are max_len tokens (Devlin et al.).
    """
    special = special_ids(tokenizer)
    encodings = tokenize(tokenizer, [text for row in texts for text in row], "texts")
    examples = []
    for row, label in zip(texts, labels):
        pieces = [next(encodings).ids for _ in row]
        while sum(map(len, pieces)) > max_len - 1 - len(pieces):
            longest = max(reversed(pieces), key=len)  # the second, if both are equally long
            longest.pop()
        ids = [special.cls]
        for piece in pieces:
            ids += [*piece, special.sep]
        examples.append(Example(np.array(ids, np.int32), len(pieces[0]) + 2, label, row))
    return examples


def load_examples(task, split, tokenizer, max_len, stride, most=0):
    """Read and encode a split: a list of Examples, or of SQuAD's Windows. Print their number.

    most: draw this many, the same ones each time, in the order of the file; 0: all.
    """
    path = task.file(split)
    if task.reads_spans:
        examples = make_windows(tokenizer, read_squad(path, True), max_len, stride)
    else:
        examples = list(zip(*read_split(task, split)))
    order = np.random.default_rng(0).permutation(len(examples))
    chosen = [examples[n] for n in sorted(order[:most or None])]
    if not task.reads_spans:
        chosen = encode_examples(tokenizer, *zip(*chosen), max_len)
    print(f"{path}: {len(chosen):,} examples")
    return chosen


def pad(examples):
    """Pad Examples or Windows to the longest. Returns arguments of a model, arrays (batch, time).

    They are ids, token_types and, if anything is padded, a mask that is True at real tokens.
    """
    shape = len(examples), max([len(example.ids) for example in examples], default=1)
    ids, token_types, mask = np.zeros((3, *shape), int)
    for n, example in enumerate(examples):
        length = len(example.ids)
        ids[n, :length] = example.ids
        token_types[n, example.first_length:] = 1
        mask[n, :length] = 1
    batch = {"ids": ids, "token_types": token_types}
    return batch if mask.all() else {**batch, "mask": mask > 0}  # faster without a mask


def batches_by_length(examples, size):
    """Sort Examples or Windows by length, cut them into batches: a list of arrays of indices."""
    order = np.argsort([len(example.ids) for example in examples], kind="stable")
    return np.split(order, range(size, len(order), size))


@torch.no_grad()
def predict_examples(model, examples, batch_size=32, dtype=torch.float32):
    """Predict for Examples with a Classifier, or for Windows with a SpanReader.

    A Classifier gives an array (n, classes) of probabilities, or (n, 1) of scores if there are no
    classes. A SpanReader gives (n, 3), see best_spans. Each module keeps its mode.
    """
    in_training = [module for module in model.modules() if module.training]
    device = model.head.weight.device
    reads_spans = isinstance(model, SpanReader)
    predictions = np.zeros((len(examples), 3 if reads_spans else model.head.out_features))
    model.eval()  # not the compiled model, which would be compiled again
    for index in deal_batches(batches_by_length(examples, batch_size)):
        batch = [examples[n] for n in index]
        with autocast(device, dtype):
            output = model(**to_device(pad(batch), device)).float().cpu()
        if reads_spans:
            output = best_spans(output, batch)
        elif output.shape[1] > 1:
            output = output.softmax(1)
        predictions[index] = output
    for module in in_training:
        module.training = True
    return sum_over_ranks(predictions)


def prediction_cells(predictions, labels):
    """Return dicts by column: scores, or the classes named by `labels` with probabilities."""
    if not labels:
        return [{"prediction": f"{score:.3f}"} for [score] in predictions]
    return [{"prediction": labels[row.argmax()], "probability": f"{row.max():.4f}"}
            for row in predictions]


def score_dev(task, dev, predictions):
    """Score the predictions for the dev splits: {metric: number}.

    dev: Examples or Windows, predictions: see predict_examples; both by the keys of task.dev.
    """
    scores = {}
    for suffix, examples in dev.items():
        if task.reads_spans:
            return score_squad(best_answers(examples, predictions[suffix]))
        labels = np.array([example.label for example in examples])
        predicted = predictions[suffix]
        predicted = predicted.argmax(1) if task.labels else predicted[:, 0]
        for metric in task.metrics:
            scores[metric + suffix] = float(METRICS[metric](labels, predicted))
    return scores


# 97.5% quantiles of Student's t distribution, for 1 to 9 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def student_interval(numbers):
    """Return the mean, and how far its 95% interval reaches to each side; nan of one number."""
    degrees = len(numbers) - 1
    if not degrees:
        return numbers[0], math.nan
    # beyond the table within 0.4%
    quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
    return np.mean(numbers), quantile * np.std(numbers, ddof=1) / len(numbers)**0.5


def pearson(x, y):
    """Compute the correlation; nan if x or y is constant."""
    return np.corrcoef(x, y)[0, 1] if np.ptp(x) and np.ptp(y) else np.nan


def mean_ranks(x):
    """Rank numbers from 1; equal numbers share their mean rank."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


METRICS = {  # of labels x and predictions y, arrays (n,)
    "accuracy": lambda x, y: (x == y).mean(),
    "f1": lambda x, y: 2 * (x @ y) / max(1, (x + y).sum()),  # of class 1; 0 if it never occurs
    "matthews_correlation": lambda x, y: np.nan_to_num(pearson(x, y)),  # 0 if x or y is constant
    "pearson": pearson,
    "spearmanr": lambda x, y: pearson(mean_ranks(x), mean_ranks(y)),
}
