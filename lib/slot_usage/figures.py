"""
Figures of measure.py, drawn with matplotlib: one style, readable in grey, names beside the lines.
"""
import itertools
from pathlib import Path

from lib.common.errors import need

# Okabe and Ito's colours, neighbours of different lightness, each with another line style
COLORS = "black", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
LINES = "-", "--", "-.", ":", (0, (10, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4))
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "figure.labelsize": 8, "grid.alpha": 0.3, "legend.frameon": False,
         "savefig.dpi": 150}
MARKERS = {"o": "●", "s": "■", "^": "▲", "v": "▼", "D": "◆", "x": "×"}  # of layers; in text


def subplots(rows, columns, width, height, **settings):
    """A figure, and its (rows, columns) panels, each of width x height inches."""
    pyplot = need("matplotlib.pyplot", "a figure")
    pyplot.switch_backend("Agg")
    pyplot.rcParams.update(STYLE)
    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                           figsize=(columns * width, rows * height), **settings)


def draw_bars(bars, columns, width, numbers, xlabel="", ylabel=""):
    """A figure of bars, each (title of its panel, label, height), `width` inches a bar, with the
    heights above them in the format `numbers`; the panels are in so many columns. If they have a
    fourth part, the height of a noise floor, that is a bar beside each. "never" is black."""
    titles = list(dict.fromkeys(title for title, *_ in bars))
    width = max(3.5, width * len(bars) / len(titles))
    figure, grid = subplots(-(-len(titles) // columns), columns, width, 1.8,
                            sharey=bool(ylabel) or "row")  # of one unit one scale
    for axes, title in zip(grid.flat, titles, strict=False):
        labels, heights, *floors = zip(*(bar[1:] for bar in bars if bar[0] == title), strict=True)
        left = {"width": -0.4, "align": "edge"} if floors else {}
        colors = [COLORS[0] if label == "never" else COLORS[1] for label in labels]
        parts = [axes.bar(labels, heights, color=colors, **left)]
        parts += [axes.bar(labels, floor, 0.4, align="edge", color="silver") for floor in floors]
        for part in parts:
            axes.bar_label(part, fmt=numbers, padding=1)
        axes.set_title(title, loc="left")
        axes.margins(y=0.2)
        axes.grid(axis="y")
        axes.tick_params(axis="x", length=0)
    for axes in grid.flat[len(titles):]:
        axes.remove()
    if floors:
        figure.legend(parts, ["the two classes", "two random halves of one class"], ncols=2,
                      loc="outside upper right")
    figure.supxlabel(xlabel)
    figure.supylabel(ylabel)
    return figure


def draw_curves(runs):
    """Perplexity, zoomed to low values, up to where the runs that go on from another model start;
    beside it the usage of those with memory. runs: {path: read_evaluations}."""
    memories = [evaluations for evaluations in runs.values() if evaluations[-1]["layers"]]
    figure, [[left, *right]] = subplots(1, 1 + bool(memories), 5.5, 4)
    starts = [first["perplexity"] for first, *_ in runs.values() if first["step"]]
    ends = [last["perplexity"] for *_, last in runs.values()]
    low, top = min(ends), 1.05 * max([2 * min(ends), *starts, *ends])
    ticks = [digit * 10**n for n in range(6) for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    left.set(ylabel="perplexity, held-out text", yscale="log", yticks=ticks,
             yticklabels=[f"{tick:g}" for tick in ticks], ylim=(0.95 * low, top))
    left.minorticks_off()
    zoomed = [[e for e in evaluations if e["perplexity"] <= top] for evaluations in runs.values()]
    for axes, shown in ((left, zoomed), *((axes, memories) for axes in right)):
        steps = [evaluation["step"] for evaluations in shown for evaluation in evaluations]
        margin = 0.02 * (max(steps) - min(steps))
        axes.set(xlabel="training steps, those of the initial model included",
                 xlim=(min(steps) - margin, max(steps) + margin))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid()

    names = {axes: [] for axes in (left, *right)}  # of each panel: (line, name)
    for number, (path, evaluations) in enumerate(runs.items()):
        steps, name = [e["step"] for e in evaluations], Path(path).name
        look = {"color": COLORS[number % 7], "linestyle": LINES[number % 7]}
        start = {"marker": "o", "markevery": [0], "fillstyle": "none"} if steps[0] else {}
        line = left.plot(steps, [e["perplexity"] for e in evaluations], **look, **start)
        names[left].append((*line, name))
        for layer, marker in zip(evaluations[-1]["layers"], MARKERS, strict=False):
            right[0].set(ylabel="top-1 memory usage (%)", ylim=(0, 102))
            usage = [100 * e["layers"][layer]["top1_mu"] for e in evaluations]
            line = right[0].plot(steps, usage, marker=marker, markersize=4, markevery=0.08, **look)
            names[right[0]].append((*line, f"{MARKERS[marker]} {name}, layer {layer}"))
    for axes, lines in names.items():
        label_ends(axes, lines)
    return figure


def label_ends(axes, lines, gap=0.042):
    """Write each line's name at its end, to the right of the panel, and if it ends before others
    below its end; names are at least `gap` of the panel's height apart. lines: [(line, name)]."""
    ends = {}  # {last step: [[height of the name, end of the line, name, color]]}
    for line, name in lines:
        end = line.get_xydata()[-1]
        height = axes.transAxes.inverted().transform(axes.transData.transform(end))[1]
        ends.setdefault(end[0], []).append([height, end, name, line.get_color()])
    for step, group in ends.items():
        is_last = step == max(ends)
        spread(group, gap)
        for height, end, name, color in group:
            leader = {"arrowstyle": "-", "color": color, "relpos": (0, 0.5), "shrinkB": 2}
            look = {"arrowprops": leader} if is_last else {"ha": "right"}
            x, height = (1.04, height) if is_last else (step, height - 0.035)
            axes.annotate(name, end, (x, height), va="center", annotation_clip=False, **look,
                          textcoords="axes fraction" if is_last else axes.get_xaxis_transform())


def spread(group, gap):
    """Move the heights, the first of each list in the group, apart to `gap`, within 0 and 1."""
    group.sort(key=lambda one: one[0])
    for _ in range(1000):
        for lower, upper in itertools.pairwise(group):
            overlap = max(0, gap - (upper[0] - lower[0]))
            lower[0] -= overlap / 2
            upper[0] += overlap / 2
        group[0][0], group[-1][0] = max(0, group[0][0]), min(1, group[-1][0])
