"""
Describe the tasks (GLUE, SQuAD 1.1, folders of your own), and read their TSV files.

>>> task = find_task("sst2")                        # data/glue/SST-2
>>> texts, labels = read_split(task, "train")
"""
import math
import re
import string
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lib.corpus import ORDER
from lib.errors import UserError, run_script
from lib.run import Run, recipe_differences
from lib.squad import batches_by_length, best_answers, encode_examples, make_windows, read_squad


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




def load_examples(task, split, tokenizer, max_len, stride):
    """Read and tokenize a split as Examples, SQuAD as Windows. Print its size and classes."""
    path = str(task.file(split))
    if task.reads_spans:
        examples = make_windows(tokenizer, read_squad(path), max_len, stride, path)
    else:
        texts, labels = read_split(task, split)
        examples = encode_examples(tokenizer, texts, labels, max_len, path)
    classes = [] if examples.labels is None else task.labels
    shares = [f", {label} {np.mean(examples.labels == n):.1%}"
              for n, label in enumerate(classes)]
    print(f"{path}: {len(examples.ids):,} examples, "
          f"{examples.lengths.mean():.1f} tokens each{''.join(shares)}")
    return examples


class TaskData:
    """The splits of a task: train, {suffix of metrics: dev}, {name of submission: test}."""

    def __init__(self, task, tokenizer, max_len, stride):
        how = tokenizer, max_len, stride
        self.task = task
        self.train = load_examples(task, "train", *how)
        self.dev = {suffix: load_examples(task, split, *how) for suffix, split in task.dev.items()}
        self.test = {name: load_examples(task, split, *how) for name, split in task.test.items()
                     if task.file(split).exists()}


class TrainingBatches:
    """The training batches of one seed, as a function of the step."""

    unit = "examples"

    def __init__(self, examples, config):
        self.examples, self.seed = examples, config.seed
        self.size, self.accumulation = config.batch_size, config.accumulation
        self.device = config.device
        order = np.random.default_rng(0).permutation(len(examples.ids))  # for all seeds
        self.chosen = np.sort(order[:config.train_examples or None])
        self.steps_per_epoch = math.ceil(len(self.chosen) / self.size)
        self.epoch = None  # whose order epoch_batches has

    def epochs(self, steps):
        """Return how many epochs `steps` steps are."""
        return steps / self.steps_per_epoch

    def micro_batches(self, step):
        """Return the examples of a step by index, split as evenly as possible."""
        epoch, n = divmod(step, self.steps_per_epoch)
        if self.epoch != epoch:
            rng = np.random.default_rng([self.seed, ORDER, epoch])
            lengths = self.examples.lengths[self.chosen]
            self.epoch, self.epoch_batches = epoch, batches_by_length(lengths, self.size, rng)
        return np.array_split(self.chosen[self.epoch_batches[n]], self.accumulation)

    def loss_weight(self, step, micro):
        """Return a micro-batch's share of the examples of its step."""
        sizes = [len(index) for index in self.micro_batches(step)]
        return sizes[micro] / sum(sizes)

    def get(self, step, micro=0):
        """Return a micro-batch: the arguments of a model, as arrays."""
        batches = self.micro_batches(step)
        index = batches[micro] if len(batches[micro]) else batches[0][:1]  # its loss weighs 0
        return {**self.examples.pad(index, self.device), "labels": self.examples.labels[index]}


def score(task, examples, predictions):
    """Score predictions for a dev split (see predict_examples): {metric: number}."""
    if task.reads_spans:
        answers, _ = best_answers(examples, predictions)
        return score_squad(examples.questions, answers)
    predicted = predictions.argmax(1) if task.labels else predictions[:, 0]
    return {metric: float(METRICS[metric](examples.labels, predicted)) for metric in task.metrics}


def score_squad(questions, predictions):
    """Compute exact match and F1 in percent, as the official evaluate-v1.1.py does. Each counts the
    reference answer that fits best. predictions: {question id: text}."""
    exact = f1 = 0.0
    for question in questions:
        predicted = normalized_words(predictions[question.id])
        references = [normalized_words(text) for _, text in question.answers]
        exact += predicted in references
        f1 += max(2 * (Counter(predicted) & Counter(words)).total()
                  / max(1, len(predicted) + len(words)) for words in references)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalized_words(answer):
    """Split an answer into words in lower case, without ASCII punctuation and articles."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


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


TABLE_4 = list(TASKS)[:6]  # its columns; its average leaves SQuAD out


def group_seeds(paths):
    """Group finished seeds: {(initial model, update_memory, recipe): {task: {seed: Run}}}. The
    recipe is usually ''. Where runs of one initial model on one task differ in more than the seed,
    it names these settings: 'lr=2e-05'. UserError if no run is done or a seed is there twice."""
    by_task, systems = {}, {}
    for path in paths:
        finished = [seed for seed in Run(path).seeds() if seed.results()]
        if not finished:
            print(f"{path} is left out: not fine-tuned, or not done")
        for run in finished:
            settings = run.settings(["init_from", "update_memory", "task", "seed"])
            key = settings["init_from"], settings["update_memory"], task_name(settings["task"])
            by_task.setdefault(key, {})[run.folder.resolve()] = run, settings
    if not by_task:
        raise UserError(f"{', '.join(paths)}: no fine-tuned run that is done")
    for (initial, updated, task), runs in by_task.items():
        _, first = next(iter(runs.values()))
        varied = recipe_differences(first, [settings for _, settings in runs.values()])
        for run, settings in runs.values():
            recipe = ", ".join(f"{name}={settings.get(name)}" for name in varied)
            seeds = systems.setdefault((initial, updated, recipe), {}).setdefault(task, {})
            other = seeds.setdefault(settings["seed"], run)
            if other is not run:
                raise UserError(f"{other.folder} and {run.folder} have the same settings and the "
                                "same seed: leave one out")
    return systems


def score_table(paths):
    """Make the table of fine-tuned runs: (header, rows, records for JSON)."""
    systems, rows, records = group_seeds(paths), [], []
    scored = {task for tasks in systems.values() for task in tasks}
    columns = [*TABLE_4, "Avg", *(task for task in [*TASKS, *sorted(scored - TASKS.keys())]
                                  if task in scored and task not in TABLE_4)]
    for (initial, updated, recipe), tasks in systems.items():
        scores = {task: {seed: run.results() for seed, run in runs.items()}
                  for task, runs in tasks.items()}
        medians = {task: median_scores(task, seeds.values()) for task, seeds in scores.items()}
        averaged = [value for task in TABLE_4[1:] for value in medians.get(task, [])]
        if len(averaged) == 6:  # MNLI has two
            medians["Avg"] = [float(np.mean(averaged))]
        records.append({"init_from": initial, "update_memory": updated, "recipe": recipe,
                        "median": medians, "seeds": scores})
        counts = [len(seeds) for seeds in scores.values()]
        rows.append([f"{initial} {recipe}".strip(), "Y" if updated else "N",
                     f"{min(counts)}-{max(counts)}" if len({*counts}) > 1 else counts[0],
                     *("/".join(f"{value:.1f}" for value in medians.get(column, [])) or "-"
                       for column in columns)])
    titles = [TASKS[task].table_title if task in TASKS else task for task in columns]
    return ["initial model", "memory update", "seeds", *titles], rows, records


def median_scores(task, seeds):
    """Return the median of each of a task's metrics over its seeds, in percent."""
    metrics, scale = ["accuracy", "pearson"], 100  # a task of your own has one of the two
    if task in TASKS:
        metrics, scale = TASKS[task].table_metrics, TASKS[task].scale
    values = [[scores.get(f"eval_{metric}") for scores in seeds] for metric in metrics]
    if wrong := [x for of_metric in values for x in of_metric if not isinstance(x, float | None)]:
        raise UserError(f"eval_results.json of {task}: a score is {wrong[0]!r}")
    return [scale * float(np.median(of_metric)) for of_metric in values if None not in of_metric]
