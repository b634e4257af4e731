"""
Describe the tasks, GLUE, SQuAD 1.1 and folders of your own, and read their TSV files.

>>> task = find_task("sst2")                        # data/glue/SST-2
>>> texts, labels = read_split(task, "train")
"""
import codecs
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lib.common.errors import UserError, run_script


@dataclass(frozen=True)
class Task:
    """Describe a task: what is official about it, and where its files are."""
    title: str  # the name of its folder and of its submission
    labels: list | None  # classes; [] for a score or a span; None until own_task has read them
    metrics: list  # the first one picks the best epoch
    table_title: str  # the title of its column in tables of scores
    table_metrics: list  # the metrics in that column
    archives: list  # the files to download (lib/corpus/download.py)
    dev: dict = field(default_factory=lambda: {"": "dev"})  # {suffix of the metrics' names: split}
    test: dict | None = None  # {name of the submission: split}; None: {title: "test"}
    scale: int = 100  # from a metric to percent
    reads_spans: bool = False  # answers are spans of a paragraph
    name: str = ""  # find_task fills in the name and the folder
    folder: Path | None = None

    def file(self, split):
        """Return the TSV file of a split. MRPC may be as Microsoft publishes it, dev in train."""
        path = self.folder / f"{split}.tsv"
        other = self.folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
        return other if self.name == "mrpc" and not path.exists() else path


YES_NO, ENTAILED = ["0", "1"], ["entailment", "not_entailment"]
GLUE = {  # the columns of Table 4 from left to right, then the other tasks
    "mnli": Task("MNLI", ["contradiction", "entailment", "neutral"], ["accuracy"],
                 "MNLI-(m/mm)", ["accuracy", "accuracy_mm"], ["MNLI.zip"],
                 dev={"": "dev_matched", "_mm": "dev_mismatched"},
                 test={"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}),
    "qqp": Task("QQP", YES_NO, ["accuracy", "f1"], "QQP", ["accuracy"], ["QQP-clean.zip"]),
    "qnli": Task("QNLI", ENTAILED, ["accuracy"], "QNLI", ["accuracy"], ["QNLIv2.zip"]),
    "sst2": Task("SST-2", YES_NO, ["accuracy"], "SST-2", ["accuracy"], ["SST-2.zip"]),
    "cola": Task("CoLA", YES_NO, ["matthews_correlation", "accuracy"],
                 "CoLA (Matt)", ["matthews_correlation"], ["CoLA.zip"]),
    "mrpc": Task("MRPC", YES_NO, ["accuracy", "f1"], "MRPC (Acc/F1)", ["accuracy", "f1"],
                 ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"]),
    "stsb": Task("STS-B", [], ["pearson", "spearmanr"],
                 "STS-B (P/S)", ["pearson", "spearmanr"], ["STS-B.zip"]),
    "rte": Task("RTE", ENTAILED, ["accuracy"], "RTE", ["accuracy"], ["RTE.zip"]),
}
SQUAD = Task("squad", [], ["f1", "exact_match"], "SQuAD 1.1 (EM/F1)", ["exact_match", "f1"],
             ["train-v1.1.json", "dev-v1.1.json"], scale=1, reads_spans=True)
TASKS = {"squad": SQUAD, **GLUE}

# The columns of texts and labels in the official files
TEXTS = (("question", "sentence"), ("question1", "question2"), ("sentence1", "sentence2"),
         ("#1 String", "#2 String"), ("sentence",))
LABELS = ("gold_label", "label", "is_duplicate", "Quality", "score")
COLA = ["source", "label", "star", "sentence"]  # its train.tsv and dev.tsv have no header


def find_task(name, root="data"):
    """Find a Task by its name or folder; UserError if it is not there. name: "sst2" or "SST-2" and
    so on, "docs" (made if missing), or a folder with train.tsv, dev.tsv and maybe test.tsv."""
    key, folder = task_name(name), Path(name or "?")
    hint = f"expected docs, {', '.join(TASKS)}, or a folder of your own"
    if key in TASKS:
        command = "squad" if key == "squad" else f"glue {GLUE[key].title}"
        folder, hint = Path(root, *command.split()), f"python prepare_data.py {command}"
    if name == "docs":
        folder = Path(root, "docs_task")
        if not folder.exists():
            run_script("prepare_data.py", "docs_task", "--if_missing")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: {hint}")
    task = TASKS[key] if key in TASKS else own_task(folder, Path(name).name)
    return replace(task, name=key, folder=folder, test=task.test or {task.title: "test"})


def task_name(task):
    """Return a task's short name: "sst2" for "SST-2", or the last part of a path. A folder of your
    own with an official name becomes "own_rte"."""
    key, last = (name.lower().replace("-", "") for name in (task, Path(task).name))
    return key if key in TASKS else f"own_{last}" if last in TASKS else Path(task).name


def own_task(folder, title):
    """Describe a task of your own by its train.tsv: its classes, or scores as in STS-B."""
    task = Task(title, None, ["accuracy"], title, ["accuracy"], [], folder=folder)
    _, labels, _ = parse_split(task, "train")
    if isinstance(labels[0], float):
        return replace(task, labels=[], metrics=GLUE["stsb"].metrics)
    classes = sorted(set(labels))
    if len(classes) == 1:
        raise UserError(f"{task.file('train')}: every label is {labels[0]!r}")
    return replace(task, labels=classes)


def read_split(task, split):
    """Read the texts of a split, tuples of one or two, and its labels. The labels are an array of
    classes or scores, None for a test split. Prints how many training rows were left out."""
    texts, labels, left_out = parse_split(task, split)
    if left_out:
        print(left_out)
    if split.startswith("test"):
        return texts, None
    if not task.labels:
        return texts, np.array(labels, np.float32)  # MPS has no float64
    return texts, np.array([task.labels.index(label) for label in labels])


def parse_split(task, split):
    """Parse the rows of a split. Returns the texts, the labels as names or scores (None in a test
    split), and a line about the rows that were left out. Quotes are ordinary characters.

    A malformed row is a UserError with file and line. A blank line between rows is malformed too:
    without it later rows would have other numbers. In training data up to one row in a hundred may
    be malformed, as a few of QQP's are, and is left out."""
    path, is_test = task.file(split), split.startswith("test")
    lines = read_lines(path)
    columns = COLA if task.name == "cola" and not is_test else next(lines, (1, []))[1]
    text_columns = find_columns(columns)
    label_column = next((name for name in LABELS if name in columns and not is_test), None)
    if text_columns is None or not (label_column or is_test):
        raise UserError(f"{path}:1: columns {columns}: expected a header with sentence, or "
                        "sentence1 and sentence2, and label (or score, a number)")
    if path.name == "msr_paraphrase_train.txt":
        dev_ids = [ids for _, ids in read_lines(task.folder / "mrpc_dev_ids.tsv")]
        lines = [row for row in lines if (row[1][1:3] in dev_ids) == (split == "dev")]
    classes = [] if task.labels is None and label_column == "score" else task.labels
    texts, labels, malformed = [], [], []
    for number, fields in lines:
        row = dict(zip(columns, fields))
        try:
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, expected {len(columns)}")
            labels.append(parse_label(row[label_column], classes) if label_column else None)
            texts.append(tuple(row[name] for name in text_columns))
        except ValueError as error:
            malformed.append(f"{path}:{number}: {error}")
    n_rows, left_out = len(malformed) + len(texts), ""
    if malformed:
        count = f"{len(malformed):,} of {n_rows:,} rows"
        if split != "train" or 100 * len(malformed) > n_rows:
            raise UserError(f"{malformed[0]} ({count} are malformed)")
        left_out = f"{malformed[0]}; {count} left out"
    if not texts:
        raise UserError(f"{path}: no row in it")
    return texts, labels, left_out


def find_columns(header, choices=TEXTS):
    """Return the first of `choices`, tuples of names, that the header has, or None."""
    return next((names for names in choices if set(names) <= set(header)), None)


def parse_label(text, classes):
    """Parse a label: one of the classes. If classes is [], a number; if it is None, any name."""
    if classes == [] and np.isfinite(float(text)):
        return float(text)
    if text in (classes or ()) or (classes is None and text.strip()):
        return text
    expected = classes or ["a number" if classes == [] else "a class"]
    raise ValueError(f"label {text!r}: expected {', '.join(expected)}")


def row_names(task, split):
    """Return how a submission names the rows of a test split. The names are in its column `index`,
    or `id` in QQP; without one they are the numbers from 0."""
    (_, columns), *lines = read_lines(task.file(split))
    own = next((columns.index(name) for name in ("index", "id") if name in columns), None)
    return [str(n) if own is None else fields[own] for n, (_, fields) in enumerate(lines)]


def read_lines(path):
    """Yield (line number, fields) of a TSV file, without blank lines at its end."""
    if not path.exists() or path.is_dir():
        raise UserError(f"{path}: no such file")
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    while lines and not lines[-1].rstrip(b"\r"):
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            yield number, line.decode().rstrip("\r").split("\t")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: {line[error.start]:#04x} at byte {error.start} "
                            "of the line is not UTF-8") from None


def tsv_text(rows):
    """Join rows to the text of a TSV file; a tab or line break in a cell becomes a space."""
    return "".join("\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row) + "\n"
                   for row in rows)
