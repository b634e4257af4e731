"""
Measure language models for Table 2, and write tables for people.
"""
import json

import numpy as np

from lib.common.errors import UserError
from lib.common.files import atomic, write_text
from lib.common.progress import Progress, markdown
from lib.corpus.batches import causal_heldout, masked_heldout
from lib.slot_usage.counts import evaluate_language_model
from lib.tasks.run_facts import trained_steps
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights

USAGE = ["layers", "MU %", "uniform", "top-1 MU %", "uniform", "KL_u", "KL_w", "effective k",
         "accesses"]
USAGE_CELLS = ["{layer}", "{mu:.1%}", "{mu_uniform:.1%}", "{top1_mu:.1%}", "{top1_mu_uniform:.1%}",
               "{kl_u:.2f}", "{kl_w:.2f}", "{effective_k:.1f}", "{accesses:,.0f}"]


def check_language_model(path, causal):
    """UserError unless the model of `path` is a causal language model, or else a masked one."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


def test_batches(corpus, causal, seq_len, batch_size, sequences, maskings):
    """List the batches of a corpus's test split, once for each masking. The windows of a causal
    model overlap by half, and each predicts only what the one before did not."""
    split = corpus, "test", seq_len, batch_size, sequences
    if causal:
        return [causal_heldout(*split, stride=seq_len // 2)]
    return [masked_heldout(*split, masking) for masking in range(maskings)]


def evaluate_run(path, heldout, device, dtype):
    """Evaluate the model of `path` on {corpus: test_batches}; return a record for JSON."""
    checkpoint, _ = find_weights(path)
    print(f"{path}: weights of {checkpoint}")
    model = load_model(checkpoint).to(device)
    results = {name: [evaluate_language_model(model, Progress(batches, f"{path}, data/{name}"),
                                              device, dtype)[0] for batches in maskings]
               for name, maskings in heldout.items()}
    steps, seed = trained_steps(checkpoint)
    return {"run": path, "checkpoint": str(checkpoint), "steps": steps, "seed": seed,
            "results": results}


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
