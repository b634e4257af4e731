"""
Write tables for people: perplexity, slot usage, the files of --out.
"""
import itertools

import numpy as np

from lib.errors import UserError, need
from lib.files import atomic, to_json, write_text

USAGE = ["layers", "MU %", "uniform", "top-1 MU %", "uniform", "KL_u", "KL_w", "effective k",
         "accesses"]


def perplexity_cell(results):
    """Make a cell of Table 2: the mean, and the range over several maskings."""
    values = [result["perplexity"] for result in results]
    spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def usage_cells(usages):
    """Make the cells of USAGE: each layer's mean over a list of {layer: usage_metrics}."""
    layers = usages[0]
    if not layers:
        return ["-"] * len(USAGE)
    one = next(iter(layers.values()))  # all layers and maskings have the same accesses

    def join(key, form, factor=1):
        means = [factor * np.mean([usage[layer][key] for usage in usages]) for layer in layers]
        return "/".join(f"{mean:{form}}" for mean in means)

    return ["/".join(map(str, layers)), join("mu", ".1f", 100), f"{100 * one['mu_uniform']:.1f}",
            join("top1_mu", ".1f", 100), f"{100 * one['top1_mu_uniform']:.1f}",
            join("kl_u", ".2f"), join("kl_w", ".2f"), join("effective_k", ".1f"),
            f"{one['accesses']:,}"]


def class_table(records):
    """Make the table of Figure 4 from the records of compare_classes: header, rows, note."""
    keys = ["kl_between", "kl_floor", "kl", "iou_between", "iou_floor", "iou"]
    rows = [[r["run"], r["layer"], r["when"], *(f"{r[key]:.3f}" for key in keys),
             f"{r['accesses']:,}"] for r in records]
    header = ["run", "layer", "when", "KL", "floor", "corrected", "IOU", "floor", "corrected",
              "accesses"]
    return header, rows, (
        "Top-1 slots, train split: KL(class 1 || 0.9 class 0 + 0.1 class 1) in nats, at "
        "most 2.30, and IOU of the shares of the slots. Floor: the same between two random "
        "halves of one class. Corrected for it: a KL of 0 and an IOU of 1 mean no more "
        "difference than that. Accesses: of each half.")


def staleness_table(records):
    """Make the table of Figure 2 from the records of slot_staleness: header, rows, note."""
    columns = ["never", *sorted({step for r in records for step in r["slots"]} - {"never"})]
    rows = [[r["run"], r["layer"], f"{r['accesses']:,}",
             *(f"{r['slots'][step]:.1%}" if step in r["slots"] else None for step in columns)]
            for r in records]
    return ["run", "layer", "accesses", *map(str, columns)], rows, (
        "Share of the slots by the step of the last snapshot at which they were top-1. "
        "Accesses: in a snapshot.")


def curves_table(runs, corpus):
    """Make the table of Figure 3 from {path: evaluations}: header, rows, note."""
    rows = []
    for path, evaluations in runs.items():
        start, end = evaluations[0], evaluations[-1]
        usage = "/".join(f"{100 * metrics['top1_mu']:.1f}"
                         for metrics in evaluations[-1]["layers"].values())
        rows.append([path, f"{end['step']:,}", start["perplexity"], end["perplexity"],
                     f"{end['accuracy']:.1%}", "/".join(end["layers"]) or "-", usage or "-"])
    header = ["run", "steps", "first ppl", "last ppl", "accuracy", "layers", "top-1 MU %"]
    note = f"Held-out text of data/{corpus}; the steps of the initial model count."
    return header, rows, note


def write_table(out, header, rows, note, data, draw=None):
    """Print a table in Markdown with a note. With `out`, also write them to <out>.md, `data` to
    <out>.json, and the figure draw(data) to <out>.png and <out>.svg."""
    text = f"{markdown(header, rows)}\n{note}\n"
    print(text, end="")
    if not out:
        return
    figure = draw and draw(data)  # before any file: matplotlib may be missing
    write_text(f"{out}.md", text)
    write_text(f"{out}.json", to_json(data, indent=1) + "\n")
    if figure:
        for suffix in (".png", ".svg"):
            with atomic(out + suffix) as path:
                figure.savefig(path)
    print(f"wrote {out}.md, .json{', .png, .svg' if draw else ''}")


WIDTH = 5.5  # inches
INK = "#787878"  # of text and axes; contrast at least 4.2
# 7 colours and 6 line styles: 42 looks
COLORS = INK, "#2b7de0", "#d17500", "#0c8f60", "#cf4f9a", "#8a63d2", "#7a8a00"
LINES = "-", "--", "-.", ":", (0, (10, 3)), (0, (5, 1, 1, 1, 1, 1))
MARKERS = "os^vDx"  # of memory layers
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "text.color": INK,
         "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.labelcolor": INK,
         "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
         "axes.grid": True, "grid.color": INK, "grid.alpha": 0.3, "lines.linewidth": 1.8,
         "figure.labelsize": 11, "legend.frameon": False, "legend.handlelength": 4,
         "hatch.color": INK, "savefig.transparent": True, "savefig.dpi": 150}


def subplots(rows, columns, height, **settings):
    """Make a figure of (rows, columns) panels, together WIDTH x height inches."""
    need("matplotlib", "a figure").rcParams.update(STYLE)
    drawing = need("matplotlib.figure", "a figure")  # pyplot would keep every figure in memory
    figure = drawing.Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def run_names(paths, names):
    """Return {path: name in a figure}: the given names, which may have formulas, or the folders'.
    UserError if the numbers of names and paths differ."""
    if names and len(names) != len(paths):
        raise UserError(f"--names: {len(names)} names for {len(paths)} runs")
    names = names or [path.removeprefix("out/").replace("$", r"\$") for path in paths]
    return dict(zip(paths, names, strict=True))


def draw_staleness(records, names):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot; "never" is hatched.
    names: {path of a run: its name}."""
    rows = -(-len(records) // 2)
    figure, grid = subplots(rows, 2, 1.7 * rows + 0.5, sharey=True)
    for axes in grid.flat[len(records):]:
        axes.remove()
    for axes, record in zip(grid.flat, records):
        steps, shares = record["slots"], [100 * share for share in record["slots"].values()]
        bars = axes.bar(range(len(steps)), shares, color=["none", *[COLORS[1]] * (len(steps) - 1)])
        bars[0].set(hatch="////", edgecolor=INK)
        last = len(steps) - 1
        axes.bar_label(bars, [f"{share:.1f}" if n in (0, last) else ""
                              for n, share in enumerate(shares)])
        labels = [f"{step:,}" if type(step) is int else step for step in steps]
        shown = sorted({0, len(steps) // 2, last})
        axes.set_xticks(shown, [labels[n] for n in shown])
        axes.grid(visible=False, axis="x")
        axes.set(ylim=(0, 115), yticks=(0, 50, 100))
        axes.set_title(f"{names[record['run']]}\nlayer {record['layer']}")
    figure.supxlabel("step of the last snapshot in which a slot was top-1")
    figure.supylabel("slots (%)")
    return figure


def draw_class_distances(records, names):
    """Draw Figure 4: KL and IOU between the two classes, each beside its noise floor.
    names: {path of a run: its name}."""
    order = list(names)
    records = sorted(records, reverse=True, key=lambda record: (  # the first row is at the top
        order.index(record["run"]), record["layer"], record["when"] == "after"))
    labels = [f"{names[record['run']]}\nlayer {record['layer']}, {record['when']}"
              for record in records]
    figure, [panels] = subplots(1, 2, 0.55 * len(records) + 1.2, sharey=True)
    rows = np.arange(len(records))
    for axes, key, title in zip(panels, ("kl", "iou"), ("KL (nats)", "IOU"), strict=True):
        for kind, shift, look in (("between", 0.2, {"color": COLORS[1]}),
                                  ("floor", -0.2, {"color": "none", "edgecolor": INK,
                                                   "hatch": "////"})):
            lengths = [record[f"{key}_{kind}"] for record in records]
            bars = axes.barh(rows + shift, lengths, 0.4, **look)
            axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.3)
        axes.locator_params(axis="x", nbins=3)
        axes.set_title(title)
    panels[0].set_yticks(rows, labels)
    figure.supxlabel("before and after fine-tuning")
    figure.legend(panels[0].containers, ["two classes", "two halves of one class"],
                  ncols=2, loc="outside upper left", handlelength=2)
    return figure


def finite(evaluations):
    """List the perplexities that are numbers: those of a diverged run are not."""
    return [e["perplexity"] for e in evaluations if np.isfinite(e["perplexity"])]


def draw_curves(runs, names):
    """Draw Figure 3: perplexity above top-1 usage, against the step. Perplexity is cut off above
    the start of runs that go on from another model. runs: {path: Run(path).evaluations()}.
    names: {path: name}."""
    layers = {layer for evaluations in runs.values() for layer in evaluations[-1]["layers"]}
    markers = dict(zip(sorted(layers, key=int), itertools.cycle(MARKERS)))
    panels = 1 + bool(layers)
    height = 2.5 * panels + 0.22 * (len(runs) + len(layers)) + 0.6
    figure, grid = subplots(panels, 1, height, sharex=True)
    upper, *lower = grid.flat
    everything = finite([e for evaluations in runs.values() for e in evaluations])
    if not everything:
        raise UserError("no perplexity is a number, the runs diverged: nothing to draw")
    starts = finite([first for first, *_ in runs.values() if first["step"]])
    goes_on = any(first["step"] for first, *_ in runs.values())
    ends = finite([last for *_, last in runs.values()])
    highest = 1.05 * max([2 * min(ends or everything), *starts, *ends])
    for number, (path, evaluations) in enumerate(runs.items()):
        look = {"color": COLORS[number % 7], "linestyle": LINES[number % 6]}
        steps, perplexity = np.array([(e["step"], e["perplexity"]) for e in evaluations]).T
        first = max(0, np.argmax(perplexity <= highest) - 1)  # the line comes in from above
        start = {"marker": "o", "markevery": [0], "fillstyle": "none"} if steps[0] else {}
        upper.plot(steps[first:], perplexity[first:], label=names[path], **look, **start)
        counted = evaluations
        for layer in evaluations[-1]["layers"]:
            usage = [100 * e["layers"][layer]["top1_mu"] for e in counted]
            lower[0].plot(steps[:len(counted)], usage, marker=markers[layer], markersize=5,
                          markevery=0.08, **look)
    for axes in lower:
        axes.set(ylim=(0, 102))
        axes.set_title("top-1 memory usage (% of slots)")
        for layer, marker in markers.items():  # for the legend alone
            axes.plot([], [], marker, color=INK, label=f"layer {layer}")
    ticker = need("matplotlib.ticker", "a figure")
    upper.set(yscale="log", ylim=(0.97 * min(everything), min(highest, 1.03 * max(everything))))
    upper.set_title("perplexity on held-out text (log scale)")
    upper.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    upper.yaxis.set_major_formatter("{x:g}")
    upper.yaxis.set_minor_locator(ticker.NullLocator())
    bottom = grid.flat[-1]
    bottom.locator_params(axis="x", nbins=5)
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    bottom.set_xlabel("training steps, those of the initial model included" if goes_on else
                      "training steps")
    figure.legend(loc="outside upper left")
    return figure


def markdown(header, rows, align=str.ljust):
    """Format a Markdown table with aligned columns. A float gets two decimals, None is empty."""
    def text(cell):
        cell = "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
        return cell.replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(align, row, widths))} |\n" for row in rows)
