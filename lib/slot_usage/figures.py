"""
Draw Figures 2 to 4 with matplotlib, readable in grey.
"""
import itertools
from pathlib import Path

import numpy as np

from lib.common.errors import need

# Okabe and Ito's 7 colours, neighbours of different lightness, and 6 line styles: 42 looks
COLORS = "black", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
LINES = "-", "--", "-.", ":", (0, (10, 3)), (0, (5, 1, 1, 1, 1, 1))
MARKERS = "os^vDx"  # of memory layers
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "axes.grid": True, "axes.grid.which": "both", "grid.alpha": 0.3,
         "figure.labelsize": 8, "legend.frameon": False, "legend.handlelength": 4, "savefig.dpi": 150}


def subplots(rows, columns, width, height, **settings):
    """Make a figure of (rows, columns) panels, each width x height inches."""
    pyplot = need("matplotlib.pyplot", "a figure")
    pyplot.switch_backend("Agg")
    pyplot.rcParams.update(STYLE)
    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                           figsize=(columns * width, rows * height), **settings)


def draw_bars(axes, labels, heights, form, **settings):
    """Draw bars with their heights above them."""
    axes.bar_label(axes.bar(labels, heights, **settings), fmt=form, padding=1)
    axes.margins(y=0.2)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)


def draw_staleness(records):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot. "never" is black."""
    columns = len({record["layer"] for record in records})
    width = max(3.5, 0.45 * max(len(record["slots"]) for record in records))
    figure, grid = subplots(-(-len(records) // columns), columns, width, 1.8, sharey=True)
    for axes in grid.flat[len(records):]:  # a run has fewer layers than another
        axes.remove()
    for axes, record in zip(grid.flat, records):
        colors = ["black", *[COLORS[1]] * (len(record["slots"]) - 1)]
        draw_bars(axes, [str(step) for step in record["slots"]],
                  [100 * share for share in record["slots"].values()], "%.1f", color=colors)
        axes.set_title(f"{record['run']}, layer {record['layer']}", loc="left")
    figure.supxlabel("step of the last snapshot at which a slot was top-1")
    figure.supylabel("slots (%)")
    return figure


def draw_class_distances(records):
    """Draw Figure 4: KL and IOU between the two classes, each beside its noise floor."""
    records = sorted(records, key=lambda r: (r["run"], r["layer"], r["when"] == "after"))
    labels = [f"{r['run'].removeprefix('out/')}\nlayer {r['layer']}\n{r['when']}" for r in records]
    figure, grid = subplots(2, 1, max(3.5, 1.7 * len(records)), 1.8)
    for axes, key, title in zip(grid.flat, ("kl", "iou"), ("KL (nats)", "IOU"), strict=True):
        for name, width, color in (("between", -0.4, COLORS[1]), ("floor", 0.4, "silver")):
            heights = [record[f"{key}_{name}"] for record in records]
            draw_bars(axes, labels, heights, "%.2f", width=width, align="edge", color=color)
        axes.set_title(title, loc="left")
    figure.legend(axes.containers, ["the two classes", "two random halves of one class"], ncols=2,
                  loc="outside upper right", handlelength=2)
    return figure


def draw_curves(runs):
    """Draw Figure 3: perplexity and top-1 usage against the step. Perplexity is cut off above the
    start of runs that go on from another model. runs: {path: Run(path).evaluations()}."""
    layers = {layer for evaluations in runs.values() for layer in evaluations[-1]["layers"]}
    markers = dict(zip(sorted(layers, key=int), itertools.cycle(MARKERS)))
    figure, [[left, *right]] = subplots(1, 1 + bool(layers), 5, 4)
    starts = [first["perplexity"] for first, *_ in runs.values() if first["step"]]
    ends = [last["perplexity"] for *_, last in runs.values()]
    highest = 1.05 * max([2 * min(ends), *starts, *ends])
    for number, (path, evaluations) in enumerate(runs.items()):
        look = {"color": COLORS[number % 7], "linestyle": LINES[number % 6]}
        steps, perplexity = np.array([(e["step"], e["perplexity"]) for e in evaluations]).T
        shown = perplexity <= highest
        start = {"marker": "o", "markevery": [0], "fillstyle": "none"} if steps[0] else {}
        left.plot(steps[shown], perplexity[shown], label=Path(path).name, **look, **start)
        for layer in evaluations[-1]["layers"]:
            usage = [100 * e["layers"][layer]["top1_mu"] for e in evaluations]
            right[0].plot(steps, usage, marker=markers[layer], markersize=4, markevery=0.08, **look)
    for axes in right:
        axes.set(ylabel="top-1 memory usage (%)", ylim=(0, 102))
        for layer, marker in markers.items():  # for the legend alone
            axes.plot([], [], marker, color="gray", label=f"layer {layer}")
    left.set(ylabel="perplexity, held-out text", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    for axes in (left, *right):
        axes.set_xlabel("training steps, those of the initial model included")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside right upper")
    return figure
