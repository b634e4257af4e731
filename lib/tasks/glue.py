"""
Describe the tasks (GLUE, SQuAD 1.1, folders of your own), and read their TSV files.

>>> task = find_task("sst2")                        # data/glue/SST-2
>>> texts, labels = read_split(task, "train")
"""
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lib.common.errors import UserError, run_script


@dataclass(frozen=True)
class Task:
    """Describe a task: what is official about it, and where its files are."""
    title: str  # the name of its folder and of its submission
    labels: list  # classes; [] for a score or a span
    metrics: list  # the first one picks the best epoch
    table_title: str = ""  # of its column in tables of scores
    table_metrics: list = ()  # the metrics in that column
    archives: list = ()  # the files to download (lib/corpus/download.py)
    dev: dict = field(default_factory=lambda: {"": "dev"})  # {suffix of metrics: split}
    test: dict | None = None  # {name of the submission: split}; None: {title: "test"}
    scale: int = 100  # from a metric to percent
    reads_spans: bool = False  # answers are spans of a paragraph
    name: str = ""  # find_task fills in the name and the folder
    folder: Path | None = None

    def file(self, split):
        """Return the file of a split. MRPC's dev split is in the file of train."""
        if self.reads_spans:
            return self.folder / f"{split}-v1.1.json"
        if self.name == "mrpc":
            part = "test" if split == "test" else "train"
            return self.folder / f"msr_paraphrase_{part}.txt"
        return self.folder / f"{split}.tsv"


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
LABELS = ("gold_label",), ("is_duplicate",), ("Quality",), ("label",), ("score",)
COLA = ["source", "label", "star", "sentence"]  # its train.tsv and dev.tsv have no header


def find_task(name, root="data"):
    """Find a Task by its name or folder; UserError if it is not there.

    name: "sst2" or "SST-2", "squad", "docs" (made if missing), or a folder of your own."""
    key, folder = task_name(name), Path(name)
    hint = f"expected docs, {', '.join(TASKS)}, or a folder of your own"
    if key in TASKS:
        command = "squad" if key == "squad" else f"glue {GLUE[key].title}"
        folder, hint = Path(root, *command.split()), f"python prepare_data.py {command}"
    if name == "docs":
        folder = Path(root, "docs_task")
        if not folder.exists():
            run_script("prepare_data.py", "docs_task", "--if_missing")
    if not name:
        raise UserError(f"task is empty: {hint}")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: {hint}")
    task = TASKS[key] if key in TASKS else own_task(folder, Path(name).name)
    return replace(task, name=key, folder=folder, test=task.test or {task.title: "test"})


def task_name(task):
    """Return a task's short name: "sst2" for "SST-2", or the last part of a path.

    A folder of your own with an official name becomes "own_rte"."""
    key, last = (name.lower().replace("-", "") for name in (task, Path(task).name))
    return key if key in TASKS else f"own_{last}" if last in TASKS else Path(task).name


def own_task(folder, title):
    """Describe a task of your own by its train.tsv: its classes, or scores as in STS-B."""
    path = folder / "train.tsv"
    columns, rows = read_table(path, may_skip=True)
    [place] = find_columns(path, columns, LABELS)
    if columns[place] == "score":
        return Task(title, [], GLUE["stsb"].metrics)
    classes = sorted({row[place] for row in rows if row[place].strip()})
    if len(classes) < 2:
        raise UserError(f"{path}: labels {classes}: expected two classes or more")
    return Task(title, classes, ["accuracy"])


def read_split(task, split):
    """Read the texts of a split, and its labels.

    The texts are tuples of one or two. The labels are an array of classes or scores, None for a
    test split. UserError for a malformed row, see read_table."""
    path = task.file(split)
    if split.startswith("test"):
        columns, rows = read_table(path)
        return pick_columns(path, columns, rows, TEXTS), None
    header = COLA if task.name == "cola" else None
    columns, rows = read_table(path, header, task.labels, may_skip=split == "train")
    if task.name == "mrpc":
        _, dev_ids = read_table(task.folder / "mrpc_dev_ids.tsv", ["#1 ID", "#2 ID"])
        rows = [row for row in rows if (row[1:3] in dev_ids) == (split == "dev")]
    texts = pick_columns(path, columns, rows, TEXTS)
    labels = [parse_label(label, task.labels)
              for [label] in pick_columns(path, columns, rows, LABELS)]
    # MPS has no float64
    return texts, np.array(labels, np.int64 if task.labels else np.float32)


def parse_label(text, classes):
    """Return a class's number, or a score if there are no classes; else ValueError."""
    if text in classes:
        return classes.index(text)
    if not classes and abs(float(text)) < 1e30:  # float32 goes up to 3e38; nan is not less
        return float(text)
    raise ValueError(f"label {text!r}: expected {', '.join(classes) or 'a number'}")


def row_names(task, split):
    """Return how a submission names the rows of a test split: by its column `index`, or `id` in
    QQP, or by numbers from 0."""
    columns, rows = read_table(task.file(split))
    for name in ("index", "id"):
        if name in columns:
            return [row[columns.index(name)] for row in rows]
    return [str(number) for number in range(len(rows))]


def read_table(path, columns=None, classes=None, may_skip=False):
    """Read a TSV file. Quotes are ordinary characters; blank lines at the end do not count.

    columns: the names of the columns, if the file has no header. classes: of its labels, [] for
    scores. A row with another label, or with more or fewer fields, is a UserError. `may_skip`
    leaves out one in a hundred; QQP's train.tsv needs it. Returns (columns, lists of fields)."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        number = error.object[:error.start].count(b"\n") + 1
        raise UserError(f"{path}:{number}: not UTF-8") from None
    lines = text.rstrip("\r\n").split("\n")
    table = enumerate((line.rstrip("\r").split("\t") for line in lines), 1)
    columns = columns or next(table)[1]
    label = None if classes is None else find_columns(path, columns, LABELS)[0]
    rows, malformed = [], []
    for number, row in table:
        try:
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} fields, expected {len(columns)}")
            if label is not None:
                parse_label(row[label], classes)
            rows.append(row)
        except ValueError as error:
            malformed.append(f"{path}:{number}: {error}")
    if malformed:
        total = len(malformed) + len(rows)
        count = f"{len(malformed):,} of {total:,} rows"
        if not may_skip or 100 * len(malformed) > total:
            raise UserError(f"{malformed[0]} ({count} are malformed)")
        print(f"{malformed[0]}; {count} left out")
    if not rows:
        raise UserError(f"{path}: no row in it")
    return columns, rows


def find_columns(path, columns, choices):
    """Find the first of `choices`, tuples of names, among a file's columns: their places."""
    for names in choices:
        if set(names) <= set(columns):
            if twice := [name for name in names if columns.count(name) > 1]:
                raise UserError(f"{path}:1: there are {columns.count(twice[0])} columns {twice[0]}")
            return [columns.index(name) for name in names]
    expected = ", or ".join(" and ".join(names) for names in reversed(choices))
    tabs = "; tabs separate columns" if len(columns) == 1 else ""
    raise UserError(f"{path}:1: columns {columns}: expected a header with {expected}{tabs}")


def pick_columns(path, columns, rows, choices):
    """Return each row's fields in the columns of find_columns, as a tuple."""
    places = find_columns(path, columns, choices)
    return [tuple(row[place] for place in places) for row in rows]


def tsv_text(rows):
    """Join rows to the text of a TSV file. Tabs and line breaks in cells become spaces."""
    return "".join("\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row) + "\n"
                   for row in rows)
