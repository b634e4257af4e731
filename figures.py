"""
Figures of measure.py, drawn with matplotlib.
"""
from pathlib import Path

from common import need

# Okabe and Ito's colours, neighbours of different lightness, each with another line style
COLORS = "black", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
LINES = "-", "--", "-.", ":", (0, (10, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4))


def subplots(rows, columns, width, height, **settings):
    """A figure, and its (rows, columns) panels, each of width x height inches."""
    pyplot = need("matplotlib.pyplot", "a figure")
    pyplot.switch_backend("Agg")
    pyplot.rcParams.update({"font.size": 8, "legend.handlelength": 5, "savefig.dpi": 150})
    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                           figsize=(columns * width, rows * height), **settings)


def draw_bars(bars, columns, width, numbers, xlabel="", ylabel=""):
    """A figure of bars, each (title of its panel, label, height), `width` inches a bar, with the
    heights above them in the format `numbers`; the panels are in so many columns."""
    titles = list(dict.fromkeys(title for title, *_ in bars))
    width = max(4, width * len(bars) / len(titles))
    figure, grid = subplots(-(-len(titles) // columns), columns, width, 1.8, sharey="row")
    for axes, title in zip(grid.flat, titles, strict=False):
        labels, heights = zip(*(bar[1:] for bar in bars if bar[0] == title), strict=True)
        axes.bar_label(axes.bar(labels, heights), fmt=numbers)
        axes.set_title(title)
        axes.margins(y=0.15)
    figure.supxlabel(xlabel)
    figure.supylabel(ylabel)
    return figure


def draw_curves(runs):
    """Zoomed to low perplexity: up to where the runs that go on from another model start. runs:
    {path: read_evaluations}."""
    figure, [[left, right]] = subplots(1, 2, 5.5, 4.2)
    for number, (path, evaluations) in enumerate(runs.items()):
        steps, name = [e["step"] for e in evaluations], Path(path).name
        look = {"color": COLORS[number % 7], "linestyle": LINES[number % 7]}
        start = {"marker": "o", "markevery": [0], "fillstyle": "none"} if steps[0] else {}
        left.plot(steps, [e["perplexity"] for e in evaluations], label=name, **look, **start)
        for layer, marker in zip(evaluations[-1]["layers"], "os^vDx", strict=False):
            usage = [100 * e["layers"][layer]["top1_mu"] for e in evaluations]
            right.plot(steps, usage, marker=marker, markersize=4, label=f"{name}, layer {layer}",
                       **look)
    low = min(evaluations[-1]["perplexity"] for evaluations in runs.values())
    starts = [first["perplexity"] for first, *_ in runs.values() if first["step"]]
    top = 1.05 * max([2 * low, *starts])
    ticks = [digit * 10**n for n in range(6) for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    left.set(ylabel="perplexity, held-out text", yscale="log", yticks=ticks,
             yticklabels=[f"{tick:g}" for tick in ticks], ylim=(0.95 * low, top))
    left.minorticks_off()
    right.set(ylabel="top-1 memory usage (%)", ylim=(0, 102))
    shown = [e["step"] for evals in runs.values() for e in evals if e["perplexity"] <= top]
    margin = 0.02 * (max(shown) - min(shown))
    for axes in (left, right):
        axes.set(xlabel="training steps, those of the initial model included",
                 xlim=(min(shown) - margin, max(shown) + margin))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return figure
