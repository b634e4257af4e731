"""
Write tables for people: perplexity, slot usage, the files of --out.
"""
import numpy as np

from lib.common.files import atomic, to_json, write_text
from lib.common.progress import markdown
from lib.slot_usage.counts import same_unit

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


def rows_note(records):
    """Say whose usage counts rows of a pruned memory. records: with `run` and `n_rows`."""
    if pruned := dict.fromkeys(record["run"] for record in records if record["n_rows"]):
        return f" Usage of {', '.join(pruned)} counts rows of values, which slots share."
    return ""


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
        f"difference than that. Accesses: of each half.{rows_note(records)}")


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
                         for metrics in same_unit(evaluations)[-1]["layers"].values())
        rows.append([path, f"{end['step']:,}", start["perplexity"], end["perplexity"],
                     f"{end['accuracy']:.1%}", "/".join(end["layers"]) or "-", usage or "-"])
    header = ["run", "steps", "first ppl", "last ppl", "accuracy", "layers", "top-1 MU %"]
    note = f"Held-out text of data/{corpus}; the steps of the initial model count."
    note += rows_note([{"run": path, "n_rows": evaluations[0].get("n_rows")}
                       for path, evaluations in runs.items()])
    if pruned := [path for path, every in runs.items() if same_unit(every) != every]:
        note += f" Usage of {', '.join(pruned)}: before it was pruned."
    return header, rows, note


def pruning_table(records):
    """Make the table of pruned memories from the records of prune_run: header, rows, note."""
    whole = {r["run"]: r["float32_perplexity"] for r in records if r["keep"] == 1}
    rows = [[r["run"], f"{r['keep']:.1%}", f"{r['rows']:,}", f"{r['model_bytes'] / 1e6:.2f}",
             *(cell for kind in ("float32", "int8") for cell in (
                 f"{r[f'{kind}_bytes'] / 1e6:.2f}", r[f"{kind}_perplexity"],
                 f"{r[f'{kind}_perplexity'] / whole[r['run']] - 1:+.2%}"))] for r in records]
    header = ["run", "kept", "rows", "model MB", "memory MB", "ppl", "change", "int8 MB", "ppl",
              "change"]
    return header, rows, (
        f"Test text of data/{records[0]['data']}; rows chosen by their weight in its training "
        "text. Rows: of each layer. The slots whose rows were dropped share one row, their mean. "
        "Memory: values and the row of each slot, on paper; int8: the values rounded, a scale for "
        "each row.")


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
