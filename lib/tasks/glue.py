"""
Downstream tasks: GLUE, SQuAD 1.1 and your own TSV files, as token ids, and their official scores.

>>> task = find("sst2")                             # data/glue/SST-2
>>> texts, labels = read(task, "train")
>>> examples = encode(tokenizer, texts, labels, max_len=128)
"""
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib.common.errors import UserError, run_script
from lib.corpus.vocabulary import special_ids, tokenize


@dataclass(frozen=True)
class Description:
    """Describe an official task: its files, classes, metrics and its column in tables of scores."""
    title: str  # the name of its folder and of its submission
    labels: list  # classes, [] for a score
    metrics: list  # the first one picks the best epoch
    table_title: str
    table_metrics: list  # keys of the dev results, without "eval_"
    archives: list  # the files to download (lib/corpus/download.py)
    dev: dict = field(default_factory=lambda: {"": "dev"})  # {suffix of its metrics: split}
    test: dict | None = None  # {name of the submission: split}; None: {title: "test"}
    scale: int = 100  # from a metric to percent


GLUE = {  # the columns of Table 4 from left to right, then the other tasks
    "mnli": Description("MNLI", ["contradiction", "entailment", "neutral"], ["accuracy"],
                        "MNLI-(m/mm)", ["accuracy", "accuracy_mm"], ["MNLI.zip"],
                        dev={"": "dev_matched", "_mm": "dev_mismatched"},
                        test={"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}),
    "qqp": Description("QQP", ["0", "1"], ["accuracy", "f1"],
                       "QQP", ["accuracy"], ["QQP-clean.zip"]),
    "qnli": Description("QNLI", ["entailment", "not_entailment"], ["accuracy"],
                        "QNLI", ["accuracy"], ["QNLIv2.zip"]),
    "sst2": Description("SST-2", ["0", "1"], ["accuracy"],
                        "SST-2", ["accuracy"], ["SST-2.zip"]),
    "cola": Description("CoLA", ["0", "1"], ["matthews_correlation", "accuracy"],
                        "CoLA (Matt)", ["matthews_correlation"], ["CoLA.zip"]),
    "mrpc": Description("MRPC", ["0", "1"], ["accuracy", "f1"],
                        "MRPC (Acc/F1)", ["accuracy", "f1"],
                        ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt",
                         "mrpc_dev_ids.tsv"]),
    "stsb": Description("STS-B", [], ["pearson", "spearmanr"],
                        "STS-B (P/S)", ["pearson", "spearmanr"], ["STS-B.zip"]),
    "rte": Description("RTE", ["entailment", "not_entailment"], ["accuracy"],
                       "RTE", ["accuracy"], ["RTE.zip"]),
}
SQUAD = Description("squad", [], ["f1", "exact_match"],
                    "SQuAD 1.1 (EM/F1)", ["exact_match", "f1"],
                    ["train-v1.1.json", "dev-v1.1.json"], scale=1)
TASKS = {"squad": SQUAD, **GLUE}

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
    scale: int  # from a metric to percent

    def file(self, split):
        """The TSV file of a split; of MRPC maybe as Microsoft publishes it, with dev in train."""
        path = self.folder / f"{split}.tsv"
        other = self.folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
        return other if self.name == "mrpc" and not path.exists() else path


def find_task(name, root="data"):
    """The Task called `name`: one of GLUE ("sst2" or "SST-2"), 'squad', 'docs' (made if missing),
    or a folder of your own with train.tsv, dev.tsv and maybe test.tsv."""
    key, folder = task_name(name), Path(name or "?")
    own = Description(folder.name, None, ["accuracy"], folder.name, ["accuracy"], [])
    found = TASKS.get(key, own)
    hint = f"expected docs, {', '.join(TASKS)}, or a folder of your own"
    if key in GLUE:
        folder, hint = Path(root, "glue", found.title), f"python prepare_data.py glue {found.title}"
    if key == "squad":
        folder, hint = Path(root, "squad"), "python prepare_data.py squad"
    if name == "docs":
        folder = Path(root, "docs_task")
        if not folder.exists():
            run_script("prepare_data.py", "docs_task", "--if_missing")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: {hint}")
    return Task(key, folder, found.labels, found.metrics, found.dev,
                found.test or {found.title: "test"}, found.scale)


def task_name(task):
    """The short name of a task: "sst2" for "SST-2", the last part of a path, or "own_rte" if that
    is the name of a GLUE task."""
    key, last = (name.lower().replace("-", "") for name in (task, Path(task).name))
    return key if key in TASKS else f"own_{last}" if last in TASKS else Path(task).name


def read_split(task, split):
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
        task.labels, task.metrics = [], GLUE["stsb"].metrics
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


def tsv_text(rows):
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
        ids and token_types (batch, time), and mask, True at real tokens, if there is padding.
        Of no examples they are empty."""
        lengths = self.lengths[index][:, None]
        position = np.arange(-(-lengths.max(initial=1) // multiple) * multiple)
        mask = position < lengths
        ids = np.full(mask.shape, pad_id, np.int64)
        ids[mask] = np.concatenate([ids[:0, 0], *(self.ids[n] for n in index)])
        after = position >= self.first[index][:, None]
        batch = {"ids": ids, "token_types": after.astype(np.int64)}
        return batch if mask.all() else {**batch, "mask": mask}  # without one, attention is faster


def encode_examples(tokenizer, texts, labels, max_len, what="encoding"):
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


def batches_by_length(lengths, size, rng=None):
    """Batches of examples of similar lengths, as arrays of indices: sorted by length, or, with a
    numpy Generator, in random order, sorted within 64 batches at a time."""
    n = len(lengths)
    order, bucket = (np.arange(n), n) if rng is None else (rng.permutation(n), 64 * size)
    order = order[np.lexsort((lengths[order], np.arange(n) // bucket))]
    parts = np.split(order, range(size, n, size))
    return parts if rng is None else [parts[i] for i in rng.permutation(len(parts))]
