"""
Write tables for people: perplexity, slot usage, the files of --out.
"""
import json

import numpy as np

from lib.common.files import atomic, write_text
from lib.common.progress import markdown

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
