"""
Set the results of reproduce.sh beside the paper's numbers, on one page.

$ python -m lib.page out/reproduce_demo         # writes out/reproduce_demo/page.md

results/paper.json has the paper's numbers and claims, its names for our runs, and what differs on
purpose. A side of a claim names numbers as numbers() does: "perplexity (c) / perplexity (a)".
"""
import contextlib
import json
import re
import runpy
import sys
from itertools import chain
from pathlib import Path

import numpy as np

from lib.files import markdown, null_to_nan, write_text
from lib.settings import ROOT
from lib.slots import usage_cells
from lib.tasks import score_row

PAPER = json.loads((ROOT / "results" / "paper.json").read_text(encoding="utf-8"))
SYSTEMS = {run: name for name, runs in PAPER["systems"].items() for run in runs}
LEFT_OUT = ["layers", "uniform MU", "uniform top-1", "effective k"]  # measure.py's tables have them
RULE = """
A row says yes if the difference of its sides, the mean over pairs of seeds, has the paper's sign
and is more than twice its standard error; **no** if the other sign is as clear; else undecided.
With one seed, half of the paper's own difference takes the place of two standard errors, or 10% of
the lower side where the paper has no number. Without any difference, chance decides 18% of the rows
of three seeds, 12% of five. Seeds of Tables 4, 5 and 7 share one pretrained model.

MU and top-1 MU are of the layer with less, a KL is of the layer with more, perplexity of the
longest text. Score: Table 4's Avg, of the six numbers from MNLI to CoLA, if all are there; else the
mean of all numbers in the tasks of a row, with MNLI-m alone in Tables 5 and 7.
"""


def main(folder):
    """Write page.md. A part whose results are missing tells how to make them."""
    scale = folder.name.removeprefix("reproduce_")
    parts, claims = [], []
    for describe in PARTS:
        name, title = describe.__name__, describe.__doc__.removesuffix(".")
        try:
            text, found = describe(folder)
            claims += [[title.split(":")[0], *row] for row in decide(name, found, scale)]
        except FileNotFoundError:
            text = f"Not there yet: `sh reproduce.sh {scale} {name}`."
        parts.append(f"## {title}\n\n{text}\n")
    seconds = []  # that each command took
    for log in folder.glob("logs/*"):
        seconds += map(int, re.findall(r"^took (\d+) s$", log.read_text(), re.MULTILINE))
    columns = ["where", "the paper says", "holds", "to be lower", "to be higher", "seeds"]
    parts.insert(0, (
        f"# The paper, reproduced: {scale}\n\n"
        f"Made by `sh reproduce.sh {scale}`: {len(seconds)} commands, {sum(seconds) / 3600:.1f} "
        "hours in all, some of them side by side.\n\n"
        "Numbers in brackets are the paper's; ?: not legible in our copy; -: does not apply. "
        f"{' '.join(PAPER['differs'][scale])} What the paper leaves open, and we chose: "
        "[our reading](../../docs/reproduce.md#our-reading).\n\n"
        f"## Does the paper hold here?\n\n{markdown(columns, claims)}{RULE}"))
    write_text(folder / "page.md", "\n".join(parts))
    print(f"wrote {folder}/page.md")


def decide(name, found, scale):
    """Decide a part's claims by RULE: rows. found: our cells, {seed: {row: {column: text}}}."""
    named = numbers(paper_cells(name)) | PAPER["in_words"].get(name, {})
    ours = [numbers(cells) for cells in found.values()]
    rows = []
    for claim, *sides in PAPER["claims"].get(name, []):
        paper = compare(sides, [named])
        for there, here in PAPER["stands_for"].get(scale, {}).items():
            sides = [side.replace(there, here) for side in sides]
        pairs = compare(sides, ours)
        holds = verdict(pairs, paper) if pairs else "no result"
        for word, reason in PAPER["not_here"][scale].items():
            if word in " ".join(sides):
                holds = f"not here: {reason}"
        for n, side in enumerate(sides):
            if pairs and not side.isdecimal():
                theirs = f" ({paper[0][n]:.4g})" if paper else ""
                sides[n] = f"{side} = {np.mean(pairs, 0)[n]:.4g}{theirs}"
        rows.append([claim, holds, *sides, len(pairs)])
    return rows


def compare(sides, seeds):
    """Compute the sides of a claim for each seed, {name: number}, that has all their numbers."""
    pairs = []
    for named in seeds:
        with contextlib.suppress(KeyError):
            pairs.append([compute(side, named) for side in sides])
    return pairs


def compute(side, named):
    """Compute a side: numbers and names, with "-", "/" or "per" between, from left to right."""
    words = re.split(" (-|/|per) ", side)
    result, *others = [float(word) if word.isdecimal() else named[word] for word in words[::2]]
    for sign, value in zip(words[1::2], others):
        result = result - value if sign == "-" else result / value
    return result


def verdict(pairs, paper):
    """Decide a claim by RULE. pairs: ours of each seed; paper: the paper's, one pair or none."""
    differences = np.array([higher - lower for lower, higher in pairs])
    if len(pairs) > 1:
        margin = 2 * differences.std(ddof=1) / len(pairs) ** 0.5
    elif paper:
        [[lower, higher]] = paper
        margin = (higher - lower) / 2
    else:
        margin = 0.1 * min(map(abs, pairs[0]))
    if differences.mean() > margin:
        return "yes"
    return "**no**" if differences.mean() < -margin else "undecided"


def numbers(cells):
    """Name the numbers in {row: {column: text}}: "top-1 MU (c)" is of that column, in (c)'s row.

    A name may leave out what follows a column's comma: then the last such column counts.
    """
    found = {}
    for row, texts in cells.items():
        system = re.sub(r"^(\(.\)) [^,]*", r"\1", row)  # "(c), N" of "(c) +PKM, N"
        scores = []
        for column, text in texts.items():
            try:
                layers = [number(part) for part in text.split("/")]
            except ValueError:
                continue  # not legible, or a word
            worst = max(layers) if column.startswith("KL") else min(layers)
            found[f"{column} {system}"] = found[f"{column.split(',')[0]} {system}"] = worst
            if column in PAPER["tasks"].values():
                scores += layers[:1] if column == "MNLI" else layers
        if scores:
            found[f"score {system}"] = found.get(f"Avg {system}", np.mean(scores))
    return found


def number(text):
    """Read a number in a cell: "97.4%" or "381,208"."""
    return float(text.replace(",", "").rstrip("%"))


def read(folder, name):
    """Read a result of measure.py or finetune.py, or what bench.py printed as JSON."""
    path = folder / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"), object_hook=null_to_nan)
    lines = (folder / "logs" / name).read_text(encoding="utf-8").splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def system(path):
    """Return the paper's name for the system of a run, and the seed in the run's name or "0"."""
    name = Path(path).stem
    seed = re.search(r"_s(\d+)(_|$)", name)
    name = re.sub(r"_s\d+(?=_|$)|_fixed$", "", name)
    if name not in SYSTEMS:
        name = name.rpartition("_")[0]  # without its task
    return SYSTEMS.get(name, Path(path).stem), seed[1] if seed else "0"


def place(found, path, more=""):
    """Return the cells of a run in {seed: {row: cells}}, a new dict at the first call."""
    name, seed = system(path)
    return found.setdefault(seed, {}).setdefault(name + more, {})


def over_seeds(found):
    """Take the (upper) median of each cell over the seeds: {row: {column: text}}."""
    rows = {}
    for row in dict.fromkeys(chain(*found.values())):
        seeds = [cells[row] for cells in found.values() if row in cells]
        rows[row] = {"seeds": str(len(seeds))} if len(found) > 1 else {}
        for column in seeds[0]:
            layers = zip(*[cells[column].split("/") for cells in seeds])
            middle = [sorted(texts, key=number)[len(texts) // 2] for texts in layers]
            rows[row][column] = "/".join(middle)
    return rows


def paper_cells(table):
    """Return a table of the paper: {row: {column: text}}."""
    rows = dict(PAPER.get(table, {"columns": []}))
    columns = rows.pop("columns")
    return {row: dict(zip(columns, texts)) for row, texts in rows.items()}


def beside(ours, table=None):
    """Make a table of ours, {row: {column: text}}, each cell with the paper's in brackets."""
    paper = paper_cells(table)
    columns = dict.fromkeys(chain(*paper.values(), *ours.values()))
    columns = [column for column in columns if column not in LEFT_OUT]
    rows = []
    for row in sorted({**paper, **ours}) if paper else ours:
        cells = []
        for column in columns:
            cell = ours.get(row, {}).get(column, "")
            theirs = paper.get(row, {}).get(column)
            cells.append(f"{cell} ({theirs})".strip() if theirs else cell or "-")
        rows.append([row, *cells])
    return markdown(["system", *columns], rows)


def texts(folder, name):
    """Read a table of language models: {seed: {system: cells}}. Usage is of the longest text."""
    found = {}
    for run in read(folder, name)["runs"]:
        row, longest = place(found, run["run"]), {"masked_tokens": 0}
        for text, [result] in run["results"].items():
            row[f"perplexity, {PAPER['texts'].get(text, text)}"] = f"{result['perplexity']:.2f}"
            longest = max(longest, result, key=lambda result: result["masked_tokens"])
        if longest["layers"]:
            row |= usage_cells(longest["layers"])
    return found


def scores(folder, name, row="{system}"):
    """Read a table of fine-tuned runs: {row: cells}, medians, and {seed: {row: cells}}."""
    rows, found = {}, {}
    for record in read(folder, name):
        path, update = record["initial model"], record["memory update"]
        title, start = system(path)
        key = row.format(system=title, update=update)
        rows[key] = score_cells(record)
        seeds = {}  # {seed: {task: its scores}}
        for task in PAPER["tasks"]:
            if isinstance(record.get(task), str):  # nan: it is not there
                run = f"{Path(path).name}_{task}" + ("_fixed" if update == "N" else "")
                for seed, results in read(folder / run, "eval_results")["seeds"].items():
                    seeds.setdefault(seed, {})[task] = results
        for seed, tasks in seeds.items():
            cells = score_cells(score_row(path, update == "Y", tasks))
            if cells.keys() == rows[key].keys():  # a mean is of all tasks
                found.setdefault((start, seed), {})[key] = cells
    return rows, found


def score_cells(record):
    """Make the cells of a row of measure.py glue."""
    columns = {**PAPER["tasks"], "Avg": "Avg"}
    return {title: record[task].split()[0]  # the number of seeds follows
            for task, title in columns.items() if isinstance(record.get(task), str)}


def times(folder, name):
    """Read times: the machine, {row: {column: text}}."""
    rows = {}
    found = read(folder, name)
    modes = {record.get("compiled") for record in found["results"]}
    only = "" if len(modes) > 1 else ", compiled" if True in modes else ", not compiled"
    machine = f"{found['machine']}, torch {found['torch']}, {found['dtype']}{only}.\n\n"
    for record in found["results"]:
        size, length = re.fullmatch(r"(.*), 1 x (\d+)", record["what"]).groups()
        row = f"{size} {record['system']}".removeprefix("inference ")
        if len(modes) > 1 and record["compiled"]:
            row += ", compiled"
        parameters = record.get("mlm_parameters", record["parameters"])  # as the paper counts
        cells = rows.setdefault(row, {"parameters (M)": f"{parameters / 1e6:.1f}"})
        cells[f"ms, {length} tokens"] = f"{1000 * np.median(record['seconds']):.4g}"
        if "batches/s" in record:
            cells[f"batches/s, {length} tokens"] = f"{record['batches/s']:.3g}"
            cells[f"relative, {length} tokens"] = f"{record['relative_batches/s']:.2f}"
        if "multiplications" in record:
            cells["multiplications of a search"] = f"{record['multiplications']:,}"
    return machine, rows


def table1(folder):
    """Table 1: speed at batch size 1."""
    machine, rows = times(folder, "table1")
    return machine + beside(rows, "table1"), {"0": rows}


def table2(folder):
    """Table 2: perplexity and usage."""
    found = texts(folder, "table2")
    return beside(over_seeds(found), "table2"), found


def figure2(folder):
    """Figure 2: the last snapshot in which a slot was top-1."""
    found = {}
    for record in read(folder, "figure2"):
        *_, last = record["slots"].values()
        row = place(found, record["run"])
        row["in use at the end"] = f"{row.get('in use at the end', '')}/{last:.1%}".strip("/")
    return f"![Figure 2](figure2.png)\n\n{beside(over_seeds(found))}", found


def figure3(folder):
    """Figure 3: training curves from one trained model."""
    found = {}
    for path, evaluations in read(folder, "figure3").items():
        row = place(found, path)
        for when, evaluation in zip(("start", "end"), (evaluations[0], evaluations[-1])):
            row[f"perplexity, {when}"] = f"{evaluation['perplexity']:.2f}"
    return f"![Figure 3](figure3.png)\n\n{beside(over_seeds(found))}", found


def table3(folder):
    """Table 3: settings of fine-tuning at the paper's size."""
    rows = {}
    for name, config in ("SQuAD 1.1", "squad"), ("GLUE", "glue"):
        settings = runpy.run_path(f"configs/finetune_{config}.py")
        rows[name] = {key: f"{settings[key]:g}" for key in PAPER["table3"]["columns"]
                      if key in settings}
    return beside(rows, "table3"), {}


def table4(folder):
    """Table 4: fine-tuning."""
    rows, found = scores(folder, "table4")
    return beside(rows, "table4"), found


def table5(folder):
    """Table 5: the memory learns in fine-tuning (Y), or is frozen (N)."""
    rows, found = scores(folder, "table5", "{system}, {update}")
    return beside(rows, "table5"), found


def table6(folder):
    """Table 6: usage after fine-tuning."""
    found = {}
    for record in read(folder, "table6"):
        task = PAPER["tasks"].get(record["task"], record["task"])
        split = "" if record["split"] == "train" else ", dev"
        place(found, record["run"], f", {task}{split}").update(usage_cells(record["layers"]))
    return ("Rows without \"dev\" are of train, which has more accesses: the claims are about "
            f"these.\n\n{beside(over_seeds(found), 'table6')}"), found


def table7(folder):
    """Table 7: a small model with a memory."""
    rows, found = scores(folder, "table7")
    models = texts(folder, "table7_text")
    for name, row in over_seeds(models).items():
        rows[name] = row | rows[name]
    return beside(rows, "table7"), found | models


def figure4(folder):
    """Figure 4: the slots of two classes."""
    found, records = {}, read(folder, "figure4")
    layers = sorted({record["layer"] for record in records})
    for record in records:
        memory = ("first", "second")[layers.index(record["layer"])]
        row = place(found, record["run"], f", {memory} memory")
        row["layer"] = str(record["layer"])
        for column, key in ("KL", "kl_whole"), ("shared", "shared"), ("IOU", "iou_whole"):
            row[f"{column}, {record['when']}"] = f"{record[key]:.3f}"
    return ("![Figure 4](figure4.png)\n\nThe picture compares halves of the classes, the table "
            "whole classes, both of train, before and after fine-tuning. KL (nats) is over the "
            "slots that both classes read, which have the share \"shared\" of their reads.\n\n"
            f"{beside(over_seeds(found))}"), found


def causal(folder):
    """Lample et al., layers: n and a memory against 2n."""
    found = texts(folder, "causal")
    machine, speeds = times(folder, "causal_time")
    for path, cells in speeds.items():
        place(found, path).update(cells)
    return machine + beside(over_seeds(found)), found


def slots(folder):
    """Lample et al., keys: flat against product."""
    machine, rows = times(folder, "slots")
    growth = {}
    for keys in "product keys", "flat keys":
        ms = [time for name, time in numbers(rows).items() if name.startswith(f"ms {keys}")]
        growth[keys] = {"growth of time": f"{ms[-1] / ms[0]:.4g}"}
    return machine + beside(rows), {"0": growth}


PARTS = (table1, table2, figure2, figure3, table3, table4, table5, table6, table7, figure4, causal,
         slots)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
