"""
Set the results of reproduce.sh beside the paper's numbers, on one page.

$ python -m lib.page out/reproduce_demo         # writes out/reproduce_demo/page.md

results/paper.json has the paper's numbers, its names for our runs, and what differs on purpose.
"""
import json
import re
import runpy
import sys
from itertools import chain
from pathlib import Path
from statistics import mean, median

from lib.files import markdown, null_to_nan, write_text
from lib.settings import ROOT
from lib.slots import usage_cells

PAPER = json.loads((ROOT / "results" / "paper.json").read_text(encoding="utf-8"))
SYSTEMS = {run: name for name, runs in PAPER["systems"].items() for run in runs}
A, B, C, D, E, F, _, H = list(PAPER["systems"])[:8]  # the paper's (a) to (h)


def main(folder):
    """Write page.md. A part whose results are missing tells how to make them."""
    scale = folder.name.removeprefix("reproduce_")
    parts, claims = [], []
    for describe in PARTS:
        title = describe.__doc__.removesuffix(".")
        try:
            text, checked = describe(folder)
        except FileNotFoundError:
            text, checked = f"Not there yet: `sh reproduce.sh {scale} {describe.__name__}`.", []
        parts.append(f"## {title}\n\n{text}\n")
        for claim, lower, higher in checked:
            holds = "yes" if lower < higher else "**no**"
            if abs(higher - lower) < 0.01 * higher:
                holds = "undecided"
            claims.append([title.split(":")[0], claim, holds, f"{lower:.4g}", f"{higher:.4g}"])
    seconds = []  # that each command took
    for log in folder.glob("logs/*"):
        seconds += map(int, re.findall(r"^took (\d+) s$", log.read_text(), re.MULTILINE))
    parts.insert(0, (
        f"# The paper, reproduced: {scale}\n\n"
        f"Made by `sh reproduce.sh {scale}`: {len(seconds)} commands, {sum(seconds) / 3600:.1f} "
        "hours in all, some of them side by side.\n\n"
        "Numbers in brackets are the paper's; ?: not legible in our copy; -: does not apply. "
        f"{' '.join(PAPER['differs'][scale])}\n\n"
        "## Does the paper hold here?\n\n"
        f"{markdown(['where', 'claim', 'holds', 'to be lower', 'to be higher'], claims)}\n"
        "Top-1 MU is that of the layer with less. 0.5 points below and 0.65 times are counted in. "
        "Undecided: less than 1% apart. Pretraining has one seed, and another seed alone moves "
        "small models by more than that, those from scratch by far (results/demo.md).\n"))
    write_text(folder / "page.md", "\n".join(parts))
    print(f"wrote {folder}/page.md")


def read(folder, name):
    """Read a result of measure.py, or what bench.py printed as JSON."""
    path = folder / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"), object_hook=null_to_nan)
    lines = (folder / "logs" / name).read_text(encoding="utf-8").splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def system(path):
    """Return the paper's name for the system of a run, or of a fine-tuned run."""
    name = Path(path).stem
    return SYSTEMS.get(name) or SYSTEMS.get(re.sub("(_fixed)?$", "", name).rpartition("_")[0], name)


def beside(ours, table=None):
    """Make a table of ours, {row: {column: text}}, each cell with the paper's in brackets."""
    paper = dict(PAPER.get(table, {"columns": []}))
    names = paper.pop("columns")
    columns = list(dict.fromkeys([*names, *chain(*ours.values())]))
    rows = []
    for row in dict.fromkeys([*paper, *ours]):
        theirs = dict(zip(names, paper.get(row, [])))
        cells = []
        for column in columns:
            cell = ours.get(row, {}).get(column, "")
            if theirs.get(column):
                cell += f" ({theirs[column]})"
            cells.append(cell.strip() or "-")
        rows.append([row, *cells])
    return markdown(["system", *columns], rows)


def lowest_top1(layers):
    """Return top-1 MU of the layer with less, in percent."""
    return 100 * min(usage["top1_mu"] for usage in layers.values())


def texts(folder, name):
    """Read a table of language models: {system: cells}, {system: perplexity}, {system: top-1 MU}.

    Perplexity and usage are those of the longest text, usage that of the layer with less.
    """
    rows, perplexity, top1 = {}, {}, {}
    for run in read(folder, name)["runs"]:
        row, longest = {}, {"masked_tokens": 0}
        for text, [result] in run["results"].items():
            row[PAPER["texts"].get(text, text)] = f"{result['perplexity']:.2f}"
            longest = max(longest, result, key=lambda result: result["masked_tokens"])
        key = system(run["run"])
        perplexity[key] = longest["perplexity"]
        if longest["layers"]:
            row |= usage_cells(longest["layers"])
            top1[key] = lowest_top1(longest["layers"])
        rows[key] = row
    return rows, perplexity, top1


def scores(folder, name, row="{system}"):
    """Read a table of fine-tuned runs: {row: cells}, {row: mean of all scores}."""
    rows, means = {}, {}
    for record in read(folder, name):
        name, update = system(record.pop("initial model")), record.pop("memory update")
        key = row.format(system=name, update=update)
        rows[key] = {}
        numbers = []
        for task, cell in record.items():
            if isinstance(cell, str):
                score = cell.split()[0]  # the number of seeds follows
                rows[key][PAPER["tasks"].get(task, task)] = score
                numbers += map(float, score.split("/") if task != "Avg" else [])
        means[key] = mean(numbers)
    return rows, means


def times(folder, name):
    """Read times: the machine, {row: {column: text}}, {row: milliseconds at the last length}."""
    rows, last = {}, {}
    found = read(folder, name)
    machine = f"{found['machine']}, torch {found['torch']}, {found['dtype']}.\n\n"
    for record in found["results"]:
        size, length = re.fullmatch(r"(.*), 1 x (\d+)", record["what"]).groups()
        row = f"{size} {record['system']}".removeprefix("inference ")
        last[row] = 1000 * median(record["seconds"])
        cells = rows.setdefault(row, {"parameters (M)": f"{record['parameters'] / 1e6:.1f}"})
        cells[f"ms, {length} tokens"] = f"{last[row]:.4g}"
        if "batches/s" in record:
            cells[f"batches/s, {length} tokens"] = f"{record['batches/s']:.3g}"
            cells[f"relative, {length} tokens"] = f"{record['relative_batches/s']:.2f}"
        if "multiplications" in record:
            cells["multiplications of a search"] = f"{record['multiplications']:,}"
    return machine, rows, last


def table1(folder):
    """Table 1: speed at batch size 1."""
    machine, rows, ms = times(folder, "table1")
    claims = []
    if "large" in ms:
        claims = [("ms: base +ResM below large", ms["base +ResM"], ms["large"])]
    return machine + beside(rows, "table1"), claims


def table2(folder):
    """Table 2: perplexity and usage."""
    rows, perplexity, top1 = texts(folder, "table2")
    return beside(rows, "table2"), [
        ("perplexity: (c) below (a), both from scratch", perplexity[C], perplexity[A]),
        ("perplexity: (f) below (b), both trained on", perplexity[F], perplexity[B]),
        ("perplexity: (f) below (e)", perplexity[F], perplexity[E]),
        ("top-1 MU: (d) above (c)", top1[C], top1[D]),
        ("top-1 MU: (f) above (d)", top1[D], top1[F]),
        ("top-1 MU: (f) above (e)", top1[E], top1[F])]


def figure2(folder):
    """Figure 2: the last snapshot in which a slot was top-1."""
    stale = {}
    for record in read(folder, "figure2"):
        *_, last = record["slots"].values()
        stale.setdefault(system(record["run"]), []).append(100 * (1 - last))
    return "![Figure 2](figure2.png)", [
        ("slots not top-1 in the last snapshot (%): (f) below (c)", max(stale[F]), max(stale[C]))]


def figure3(folder):
    """Figure 3: training curves from one trained model."""
    rows, start = {}, {}
    for path, evaluations in read(folder, "figure3").items():
        name = system(path)
        start[name], end = evaluations[0]["perplexity"], evaluations[-1]["perplexity"]
        rows[name] = {"perplexity at the start": f"{start[name]:.2f}", "at the end": f"{end:.2f}"}
    return f"![Figure 3](figure3.png)\n\n{beside(rows)}", [
        ("perplexity at the start: (f) below (e)", start[F], start[E]),
        ("perplexity at the start: (f) below ResM'", start[F], start["ResM'"])]


def table3(folder):
    """Table 3: settings of fine-tuning at the paper's size."""
    rows = {}
    for name, config in ("SQuAD 1.1", "squad"), ("GLUE", "glue"):
        settings = runpy.run_path(f"configs/finetune_{config}.py")
        rows[name] = {key: f"{settings[key]:g}" for key in PAPER["table3"]["columns"]
                      if key in settings}
    return beside(rows, "table3"), []


def table4(folder):
    """Table 4: fine-tuning."""
    rows, means = scores(folder, "table4")
    return beside(rows, "table4"), [
        ("mean score: (f) above (b)", means[B], means[F]),
        ("mean score: (f) above (e)", means[E], means[F]),
        ("mean score: (f) at most 0.5 below (h)", means[H] - 0.5, means[F])]


def table5(folder):
    """Table 5: the memory learns in fine-tuning (Y), or is frozen (N)."""
    rows, means = scores(folder, "table5", "{system}, {update}")
    claims = []
    for name in (C, D, E, F):
        claims.append((f"mean score: {name[:3]} lower with a frozen memory",
                       means[f"{name}, N"], means[f"{name}, Y"]))
    return beside(rows, "table5"), claims


def table6(folder):
    """Table 6: usage after fine-tuning."""
    rows, top1 = {}, {}
    for record in read(folder, "table6"):
        name = system(record["run"])
        task = PAPER["tasks"].get(record["task"], record["task"])
        cells = {"split": record["split"], **usage_cells(record["layers"])}
        for column, cell in cells.items():
            rows.setdefault(name, {})[f"{task} {column}"] = cell
        top1[name] = min(lowest_top1(record["layers"]), top1.get(name, 100))
    return beside(rows, "table6"), [("top-1 MU: (f) above (c)", top1[C], top1[F])]


def table7(folder):
    """Table 7: a small model with a memory."""
    rows, means = scores(folder, "table7")
    cells, perplexity, _ = texts(folder, "table7_text")
    small, with_memory, middle = perplexity
    for name, row in cells.items():
        rows[name] = row | rows[name]
    return beside(rows, "table7"), [
        ("mean score: a memory helps", means[small], means[with_memory]),
        ("perplexity: with a memory below the larger model", perplexity[with_memory],
         perplexity[middle])]


def figure4(folder):
    """Figure 4: the slots of two classes."""
    rows, after = {}, {}
    for record in read(folder, "figure4"):
        name = system(record["run"])
        row = f"{name}, layer {record['layer']}, {record['when']} fine-tuning"
        rows[row] = {"KL (nats)": f"{record['kl_whole']:.2f}", "IOU": f"{record['iou_whole']:.2f}"}
        if record["when"] == "after":
            after.setdefault(name, []).append(record)
    claims = []
    for c, f in zip(after[C], after[F]):
        claims += [(f"KL, layer {c['layer']}: (f) above (c)", c["kl_whole"], f["kl_whole"]),
                   (f"IOU, layer {c['layer']}: (f) below (c)", f["iou_whole"], c["iou_whole"])]
    text = ("![Figure 4](figure4.png)\n\nThe picture compares halves of the classes, the table "
            "whole classes.\n\n")
    return text + beside(rows), claims


def causal(folder):
    """Lample et al., layers: n and a memory against 2n."""
    rows, perplexity, _ = texts(folder, "causal")
    machine, speeds, ms = times(folder, "causal_time")
    ms = {system(path): time for path, time in ms.items()}
    for path, row in speeds.items():
        rows[system(path)] |= row
    _, deeper, memory = perplexity
    return machine + beside(rows), [
        (f"perplexity: {memory} below {deeper}", perplexity[memory], perplexity[deeper]),
        (f"ms: {memory} at most 0.65 of {deeper}", ms[memory], 0.65 * ms[deeper])]


def slots(folder):
    """Lample et al., keys: flat against product."""
    machine, rows, ms = times(folder, "slots")
    growth = {}
    for kind in ("product", "flat"):
        small, *_, large = [time for row, time in ms.items() if row.startswith(kind)]
        growth[kind] = large / small
    return machine + beside(rows), [
        ("time of the most slots, relative to the fewest: product keys at most 1.1",
         growth["product"], 1.1),
        ("the same: product keys below flat keys", growth["product"], growth["flat"])]


PARTS = (table1, table2, figure2, figure3, table3, table4, table5, table6, table7, figure4, causal,
         slots)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
