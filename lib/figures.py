"""
Write tables and draw figures: perplexity, slot usage, the files of --out.
"""
import itertools
from pathlib import Path

import numpy as np

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
        if cell is None:
            return ""
        if isinstance(cell, float):
            return f"{cell:.2f}"
        return str(cell).replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in rows)


def write_table(out, rows, note, data, draw=None):
    """Print a table and a note; with `out`, write them to <out>.md, `data` to <out>.json.

    rows: dicts {column: cell}. The figure draw(data) goes to <out>.png and <out>.svg.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = f"{markdown(columns, [map(row.get, columns) for row in rows])}\n{note}\n"
    print(text, end="")
    if not out:
        return
    write_text(f"{out}.md", text)
    write_text(f"{out}.json", to_json(data, indent=1) + "\n")
    if draw:
        figure = draw(data)
        figure.savefig(f"{out}.png", dpi=150)
        figure.savefig(f"{out}.svg")


def usage_cells(layers):
    """Make the columns of USAGE from {layer: usage_metrics}."""
    cells = {"layers": "/".join(map(str, layers)) or "-"}
    for column, (key, form) in USAGE.items():
        numbers = [f"{metrics[key]:{form}}" for metrics in layers.values()]
        cells[column] = "/".join(numbers) or "-"
    return cells


LINES = ("-", "--", "-.", ":")

def subplots(rows, columns, height, **settings):
    """Make a figure of (rows, columns) panels, 5.5 inches wide and `height` inches high."""
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(5.5, height), squeeze=False,
                           layout="constrained", **settings)


def draw_staleness(records):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot and for "never".

    records: {"run", "layer", "slots": {step of a snapshot or "never": share of the slots}}.
    """
    figure, panels = subplots(len(records), 1, 1.7 * len(records) + 0.5, sharey=True)
    for axes, record in zip(panels.flat, records, strict=True):
        steps = list(map(str, record["slots"]))
        shares = [100 * share for share in record["slots"].values()]
        bars = axes.bar(steps, shares)
        axes.bar_label(bars, fmt="%.1f")
        axes.set_ylim(0, 115)
        axes.set_title(f"{Path(record['run']).name}, layer {record['layer']}")
    figure.supxlabel("step of the last snapshot in which a slot was top-1")
    figure.supylabel("slots (%)")
    return figure


def draw_class_distances(records):
    """Draw Figure 4: KL and IOU between the two classes, each beside its noise floor.

    records: those of compare_classes.
    """
    figure, [panels] = subplots(1, 2, 0.55 * len(records) + 1.2, sharey=True)
    places = np.arange(len(records))
    labels = []
    for record in records:
        labels.append(f"{Path(record['run']).name}\nlayer {record['layer']}, {record['when']}")
    kinds = {"between": "two classes", "floor": "two halves of one class"}
    for axes, key in zip(panels, ("kl", "iou")):
        for shift, (kind, label) in zip((-0.2, 0.2), kinds.items()):
            lengths = [record[f"{key}_{kind}"] for record in records]
            bars = axes.barh(places + shift, lengths, 0.4, label=label)
            axes.bar_label(bars, fmt="%.2f")
        axes.margins(x=0.3)  # room for the labels
    panels[0].set_title("KL (nats)")
    panels[1].set_title("IOU")
    panels[0].set_yticks(places, labels)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left")
    return figure


def draw_curves(runs):
    """Draw Figure 3: perplexity above top-1 usage, against the step.

    Perplexities above twice the last ones are cut off. runs: {path: a list of evaluations}.
    """
    figure, panels = subplots(2, 1, 8, sharex=True)
    [upper], [lower] = panels
    for number, (path, log) in enumerate(runs.items()):
        color = f"C{number}"
        steps = [evaluation["step"] for evaluation in log]
        perplexity = [evaluation["perplexity"] for evaluation in log]
        upper.plot(steps, perplexity, color=color, label=Path(path).name)
        for layer, line in zip(log[-1]["layers"], itertools.cycle(LINES)):
            usage = [100 * evaluation["layers"][layer]["top1_mu"] for evaluation in log]
            lower.plot(steps, usage, line, color=color, label=f"{Path(path).name}, layer {layer}")
    last = [log[-1]["perplexity"] for log in runs.values()]
    upper.set_yscale("log")
    upper.set_ylim(0.9 * np.nanmin(last), 2 * np.nanmax(last))  # nan: diverged
    upper.yaxis.set_minor_formatter("{x:g}")
    upper.set_title("perplexity on held-out text (log scale)")
    upper.legend()
    lower.set_ylim(0, 102)
    lower.set_title("top-1 memory usage (% of slots)")
    lower.set_xlabel("training steps, with those of the initial model")
    lower.legend()
    return figure
