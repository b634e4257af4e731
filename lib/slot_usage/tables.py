"""
Write tables for people: slot usage, Table 2, the files of --out.
"""
import json

import numpy as np

from lib.common.files import atomic, write_text
from lib.common.progress import markdown

USAGE = ["layers", "MU %", "uniform", "top-1 MU %", "uniform", "KL_u", "KL_w", "effective k",
         "accesses"]
USAGE_CELLS = ["{layer}", "{mu:.1%}", "{mu_uniform:.1%}", "{top1_mu:.1%}", "{top1_mu_uniform:.1%}",
               "{kl_u:.2f}", "{kl_w:.2f}", "{effective_k:.1f}", "{accesses:,.0f}"]


def perplexity_row(record, corpora, usage_data):
    """Make a row of Table 2 from a record of evaluate_run. It has the perplexities on the corpora,
    with their range over several maskings, and the slot usage on data/<usage_data>."""
    cells = [record["run"], record["steps"], record["seed"]]
    for name in corpora:
        values = [result["perplexity"] for result in record["results"][name]]
        spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
        cells.append(f"{np.mean(values):.2f}{spread}")
    return cells + usage_cells(*(result["layers"] for result in record["results"][usage_data]))


def usage_cells(*usages):
    """Make the cells of USAGE: each layer's mean over usages, dicts {layer: usage_metrics}."""
    layers = [{"layer": n, **{key: np.mean([usage[n][key] for usage in usages]) for key in metrics}}
              for n, metrics in usages[0].items()]
    cells = []
    for cell in USAGE_CELLS:
        texts = [cell.format(**layer).rstrip("%") for layer in layers]
        if "uniform" in cell or "accesses" in cell:
            texts = texts[:1]  # the same in all layers
        cells.append("/".join(texts) or "-")
    return cells


def write_table(out, header, rows, note, data, draw=None):
    """Print a table in Markdown with a note. With `out`, also write them to <out>.md, `data` to
    <out>.json, and the figure draw(data) to <out>.png and <out>.svg."""
    text = f"{markdown(header, rows)}\n{note}\n"
    print(text, end="")
    if not out:
        return
    write_text(f"{out}.md", text)
    write_text(f"{out}.json", json.dumps(data, indent=1) + "\n")
    if draw:
        figure = draw(data)
        for suffix in (".png", ".svg"):
            with atomic(out + suffix) as path:
                figure.savefig(path)
    print(f"wrote {out}.md, .json{', .png, .svg' if draw else ''}")
