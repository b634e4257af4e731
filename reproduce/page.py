"""
Set the results of reproduce.sh beside the paper's numbers, on one page.

$ python -m reproduce.page out/reproduce_demo         # writes out/reproduce_demo/page.md

measure.py and bench.py wrote the results. A table is {seed: {system: {column: number}}} until it is
printed. A memory's number is a list with one number for each layer, as in paper.py.
"""
import json
import runpy
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path

import numpy as np

from lib.files import markdown, null_to_nan, read_json, write_text
from reproduce import claims, paper

RECIPE = ["batch_size", *paper.TABLES["table3"]["SQuAD 1.1"]]  # settings of fine-tuning
FORMS = {  # by the beginning of a column; the others have one decimal
    "perplexity": ".2f", "KL_": ".2f", "KL,": ".3f", "IOU": ".3f", "shared": ".3f",
    "parameters": ".4g", "ms": ".4g", "batches/s": ".3g", "relative": ".2f",
    "seeds": ".0f", "accesses": ",.0f", "multiplications": ",.0f",
    **dict.fromkeys(RECIPE, "g"),
}


# ---- Read results: a function for each part puts them into a table, and returns a note

def read(folder, name):
    """Read a result of measure.py, or what bench.py printed as JSON."""
    path = folder / f"{name}.json"
    if path.exists():
        return read_json(path, null_to_nan)
    lines = (folder / "logs" / name).read_text(encoding="utf-8").splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def place(table, path, more=""):
    """Return the row of a run in a table, or make it. `more` ends the system's name."""
    system, seed = paper.system_of(path)
    return table.setdefault(seed, {}).setdefault(system + more, {})


def usage(layers):
    """Make the columns of a memory's usage, lists by layer, from {layer: usage_metrics}."""
    names = {paper.MU: "mu", paper.TOP1: "top1_mu", paper.KL: "kl_u", "KL_w": "kl_w",
             "accesses": "accesses"}
    return {column: [layer[name] * (100 if "%" in column else 1) for layer in layers.values()]
            for column, name in names.items() if layers}


def texts(folder, name, table):
    """Read a table of language models. Usage is of the longest text."""
    for run in read(folder, name)["runs"]:
        row = place(table, run["run"])
        for data, result in run["results"].items():
            row[f"perplexity, {paper.PAPER['texts'].get(data, data)}"] = result["perplexity"]
        longest = max(run["results"].values(), key=lambda result: result["predicted_tokens"])
        row |= usage(longest["layers"])
    return ""


def scores(folder, name, table):
    """Read Table 4, 5 or 7. In Table 5 a system's name ends in Y if its memory learns, else N."""
    for record in read(folder, name):
        more = f", {'NY'[record['update']]}" if name == "table5" else ""
        numbers = record["scores"]  # medians over the seeds of fine-tuning
        if record["task"] == "mnli" and name != "table4":
            numbers = numbers[:1]  # the matched split
        place(table, record["initial"], more)[paper.TASKS[record["task"]]] = numbers
    return ""


def times(folder, name, table):
    """Read the times of bench.py, rounds in place of seeds. The note is about the machine."""
    found = read(folder, name)
    for record in found["results"]:
        what = record["what"] + ", compiled" * record["compiled"]
        parameters = record.get("mlm_parameters", record["parameters"])  # as the paper counts
        for number, seconds in enumerate(record["seconds"]):
            row = table.setdefault(f"round {number}", {}).setdefault(record["system"], {})
            row["parameters (M)"] = parameters / 1e6
            row[f"ms, {what}"] = 1000 * seconds
            if "batches/s" in record:
                row[f"batches/s, {what}"] = 1 / seconds
                row[f"relative, {what}"] = record["relative_batches/s"]
            if "multiplications" in record:
                row["multiplications of a search"] = record["multiplications"]
    return f"{found['machine']}, torch {found['torch']}, {found['dtype']}.\n\n"


def figure2(folder, name, table):
    for record in read(folder, "figure2_seeds"):
        *_, last = record["slots"].values()  # of the last snapshot
        place(table, record["run"]).setdefault(paper.IN_USE, []).append(100 * last)
    return "![Figure 2](figure2.png)\n\n"


def figure3(folder, name, table):
    for run, evaluations in read(folder, "figure3_seeds").items():
        for when, n in ("start", 0), ("end", -1):
            place(table, run)[f"perplexity, {when}"] = evaluations[n]["perplexity"]
    return "![Figure 3](figure3.png)\n\n"


def table3(folder, name, table):
    table["0"] = rows = {}
    for system, recipe in ("SQuAD 1.1", "squad"), ("GLUE", "glue"):
        settings = runpy.run_path(f"configs/finetune_{recipe}.py")
        rows[system] = {key: settings[key] for key in RECIPE if key in settings}
    return ""


def table6(folder, name, table):
    for record in read(folder, name):
        split = "" if record["split"] == "train" else ", dev"
        row = place(table, record["run"], f", {paper.TASKS[record['task']]}{split}")
        row |= usage(record["layers"])
    return ("Rows without \"dev\" are of train, which has more accesses: the claims are about "
            "these.\n\n")


def table7(folder, name, table):
    return scores(folder, name, table) + texts(folder, "table7_text", table)


def figure4(folder, name, table):
    for record in read(folder, "figure4_seeds"):
        row = place(table, record["run"])
        for column, key in ("KL", "kl"), ("shared", "shared"), ("IOU", "iou"):
            row.setdefault(f"{column}, {record['when']}", []).append(record[key])
    return ("![Figure 4](figure4.png)\n\nOf train, before and after fine-tuning. KL (nats) is over "
            "the slots that both classes read, which have the share \"shared\" of their reads."
            "\n\n")


def causal(folder, name, table):
    texts(folder, name, table)
    speeds = {}
    machine = times(folder, "causal_time", speeds)
    for number, rows in speeds.items():
        table[number] = {paper.system_of(config)[0]: row for config, row in rows.items()}
    return machine


PARTS = {  # in the order of the page: a part's title, and what reads its table
    "table1": ("Table 1: speed at batch size 1", times),
    "table2": ("Table 2: perplexity and usage", texts),
    "figure2": ("Figure 2: the last snapshot in which a slot was top-1", figure2),
    "figure3": ("Figure 3: training curves from one trained model", figure3),
    "table3": ("Table 3: settings of fine-tuning at the paper's size", table3),
    "table4": ("Table 4: fine-tuning", scores),
    "table5": ("Table 5: the memory learns in fine-tuning (Y), or is frozen (N)", scores),
    "table6": ("Table 6: usage after fine-tuning", table6),
    "table7": ("Table 7: a small model with a memory", table7),
    "figure4": ("Figure 4: the slots of two classes", figure4),
    "causal": ("Lample et al., layers: n and a memory against 2n", causal),
    "slots": ("Lample et al., keys: flat against product", times),
}


# ---- Write the page

COLUMNS = ["where", "section", "the paper says", "holds", "to be lower", "to be higher",
           "difference [95%]", "seeds"]
PAGE = """\
# The paper, reproduced: {scale}

Made by `{variables}sh reproduce.sh {scale}`: {commands} commands, {hours:.1f} hours in all, some \
of them side by side.

Numbers in brackets are the paper's; ?: no number, as where our copy is not legible; -: does not \
apply. {differs} What the paper leaves open, and we chose: \
[our reading](../../docs/reproduce.md#our-reading).

## Does the paper hold here?

{totals}.

{verdicts}{rule}{parts}"""


def main(folder):
    """Write page.md. A part whose results are missing tells how to make them."""
    scale = folder.name.removeprefix("reproduce_")
    variables, steps = (folder / "variables").read_text().splitlines()
    verdicts, parts = [], []
    for name, (title, read_part) in PARTS.items():
        table = {}
        if name not in steps.split():
            continue
        try:
            note = read_part(folder, name, table)
        except FileNotFoundError:
            text = f"Not there yet: `sh reproduce.sh {scale} {name}`.\n"
        else:
            ours, theirs = medians(table), paper.TABLES.get(name, {})
            if scale == "pilot":  # it has not all systems
                theirs = {system: row for system, row in theirs.items() if system in ours}
            text = note + beside(ours, theirs)
            verdicts += filter(None, (claims.decide(claim, table, scale)
                                      for claim in claims.CLAIMS if claim.table == name))
        parts.append(f"\n## {title}\n\n{text}\n")
    seconds = [int(line) for line in (folder / "seconds").read_text().split()]
    write_text(folder / "page.md", PAGE.format(
        scale=scale, variables=variables, commands=len(seconds), hours=sum(seconds) / 3600,
        differs=paper.PAPER["differs"][scale], totals=claims.totals(verdicts),
        verdicts=markdown(COLUMNS, verdicts), rule=claims.RULE, parts="".join(parts)))
    print(f"wrote {folder}/page.md")


def medians(table):
    """Take the median of each number over the seeds: {system: {column: number}}."""
    found = defaultdict(lambda: defaultdict(list))  # {system: {column: the numbers of the seeds}}
    for rows in table.values():
        for system, row in rows.items():
            for column, number in row.items():
                found[system][column].append(number)
    seeds = [rows for name, rows in table.items() if name.isdigit()]  # the others are rounds
    result = {}
    for system, columns in found.items():
        row = {column: np.median(numbers, axis=0) for column, numbers in columns.items()}
        if row.keys() >= set(paper.AVERAGED):
            row["Avg"] = claims.score(row)
        if len(seeds) > 1:
            row["seeds"] = sum(system in rows for rows in seeds)
        result[system] = row
    return result


def beside(ours, theirs):
    """Print two tables {system: {column: number}} as one, with the paper's numbers in brackets."""
    columns = list(dict.fromkeys(chain(*theirs.values(), *ours.values())))
    lines = []
    for system in sorted(theirs | ours) if theirs else ours:
        line = [system]
        for column in columns:
            cell, papers = (text(column, table.get(system, {}).get(column))
                            for table in (ours, theirs))
            line.append(f"{cell} ({papers})".strip() if papers else cell or "-")
        lines.append(line)
    return markdown(["system", *columns], lines)


def text(column, number):
    """Print a number, or the numbers of a list with "/" between. None is empty, nan is "?"."""
    if number is None:
        return ""
    form = next((form for start, form in FORMS.items() if column.startswith(start)), ".1f")
    return "/".join("?" if np.isnan(one) else f"{one:{form}}" for one in np.atleast_1d(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
