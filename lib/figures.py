"""
Write tables and draw figures: perplexity, slot usage, the files of --out.
"""
import itertools

import numpy as np

from lib.errors import need
from lib.files import to_json, write_text

USAGE = {  # column of a table: (name in usage_metrics, format)
    "MU": ("mu", ".1%"),
    "uniform MU": ("mu_uniform", ".1%"),
    "top-1 MU": ("top1_mu", ".1%"),
    "uniform top-1": ("top1_mu_uniform", ".1%"),
    "KL_u": ("kl_u", ".2f"),
    "KL_w": ("kl_w", ".2f"),
    "effective k": ("effective_k", ".1f"),
    "accesses": ("accesses", ",.0f"),
}


def markdown(header, rows):
    """Format a Markdown table with aligned columns. A float gets two decimals, None is empty."""
    def text(cell):
        cell = "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
        return cell.replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in rows)


def write_table(out, rows, note, data, figure=None):
    """Print a table and a note; with `out`, write them to <out>.md, `data` to <out>.json.

    rows: dicts {column: cell}. A figure goes to <out>.png and <out>.svg.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = f"{markdown(columns, [map(row.get, columns) for row in rows])}\n{note}\n"
    print(text, end="")
    if out:
        write_text(f"{out}.md", text)
        write_text(f"{out}.json", to_json(data, indent=1) + "\n")
    if out and figure:
        figure.savefig(f"{out}.png")
        figure.savefig(f"{out}.svg")


def perplexity_cell(results):
    """Make a cell of Table 2: the mean, and the range over several maskings."""
    values = [result["perplexity"] for result in results]
    spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def usage_cells(usages):
    """Make the columns of USAGE: each layer's mean over a list of {layer: usage_metrics}."""
    layers = usages[0]
    cells = {"layers": "/".join(map(str, layers)) or "-"}
    for column, (key, form) in USAGE.items():
        means = [np.mean([usage[layer][key] for usage in usages]) for layer in layers]
        cells[column] = "/".join(f"{mean:{form}}" for mean in means) or "-"
    return cells


INK = "#787878"  # of text and axes; can be read on white and on dark
COLORS = INK, "#2b7de0", "#d17500", "#0c8f60", "#cf4f9a", "#8a63d2", "#7a8a00"
LINES = "-", "--", "-.", ":"
MARKERS = "os^vDx"  # of memory layers
STYLE = {"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "text.color": INK,
         "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.labelcolor": INK,
         "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
         "axes.grid": True, "grid.color": INK, "grid.alpha": 0.3, "legend.frameon": False,
         "figure.constrained_layout.use": True, "savefig.transparent": True, "savefig.dpi": 150}


def subplots(rows, columns, height, **settings):
    """Make a figure of (rows, columns) panels, 5.5 inches wide and `height` inches high."""
    pyplot = need("matplotlib.pyplot", "a figure")
    pyplot.rcParams.update(STYLE)
    return pyplot.subplots(rows, columns, figsize=(5.5, height), squeeze=False, **settings)


def draw_staleness(records, names):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot and for "never".

    records: those of slot_staleness. names: {path of a run: its name}.
    """
    figure, panels = subplots(len(records), 1, 1.7 * len(records) + 0.5, sharey=True)
    for axes, record in zip(panels.flat, records, strict=True):
        shares = [100 * share for share in record["slots"].values()]
        bars = axes.bar(list(map(str, record["slots"])), shares, color=COLORS[1])
        axes.bar_label(bars, fmt="%.1f")
        axes.grid(visible=False, axis="x")
        axes.set(ylim=(0, 115), title=f"{names[record['run']]}, layer {record['layer']}")
    figure.supxlabel("step of the last snapshot in which a slot was top-1")
    figure.supylabel("slots (%)")
    return figure


def draw_class_distances(records, names):
    """Draw Figure 4: KL and IOU between the two classes, each beside its noise floor.

    records: those of compare_classes. names: {path of a run: its name}.
    """
    labels = [f"{names[record['run']]}\nlayer {record['layer']}, {record['when']}"
              for record in records]
    places = np.arange(len(records))
    figure, [panels] = subplots(1, 2, 0.55 * len(records) + 1.2, sharey=True)
    for axes, key, title in zip(panels, ("kl", "iou"), ("KL (nats)", "IOU")):
        for kind, shift, color in (("between", -0.2, COLORS[1]), ("floor", 0.2, INK)):
            lengths = [record[f"{key}_{kind}"] for record in records]
            bars = axes.barh(places + shift, lengths, 0.4, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.margins(x=0.3)
        axes.set_title(title)
    panels[0].set_yticks(places, labels)
    panels[0].invert_yaxis()
    figure.legend(panels[0].containers, ["two classes", "two halves of one class"],
                  ncols=2, loc="outside upper left")
    return figure


def draw_curves(runs, names):
    """Draw Figure 3: perplexity above top-1 usage, against the step.

    Perplexities above twice the last ones are cut off. runs: {path: a list of evaluations}.
    names: {path of a run: its name}.
    """
    layers = sorted({layer for log in runs.values() for layer in log[-1]["layers"]}, key=int)
    markers = dict(zip(layers, itertools.cycle(MARKERS)))
    figure, panels = subplots(2, 1, 5.6 + 0.22 * (len(runs) + len(layers)), sharex=True)
    [upper], [lower] = panels
    for number, (path, log) in enumerate(runs.items()):
        look = {"color": COLORS[number % 7], "linestyle": LINES[number % 4]}
        steps = [evaluation["step"] for evaluation in log]
        perplexity = [evaluation["perplexity"] for evaluation in log]
        upper.plot(steps, perplexity, label=names[path], **look)
        for layer in log[-1]["layers"]:
            usage = [100 * evaluation["layers"][layer]["top1_mu"] for evaluation in log]
            lower.plot(steps, usage, marker=markers[layer], markevery=0.08, **look)
    for layer, marker in markers.items():  # for the legend alone
        lower.plot([], [], marker, color=INK, label=f"layer {layer}")
    last = [log[-1]["perplexity"] for log in runs.values()]
    upper.set(yscale="log", ylim=(0.9 * np.nanmin(last), 2 * np.nanmax(last)),  # nan: diverged
              title="perplexity on held-out text (log scale)")
    upper.yaxis.set_major_formatter("{x:g}")
    upper.yaxis.set_minor_formatter("{x:g}")
    lower.set(ylim=(0, 102), title="top-1 memory usage (% of slots)",
              xlabel="training steps, with those of the initial model")
    figure.legend(loc="outside upper left")
    return figure
