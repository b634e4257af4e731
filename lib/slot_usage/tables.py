"""
Measure language models for Table 2, and write tables for people.
"""
import json

import numpy as np

from lib.common.errors import UserError
from lib.common.files import atomic, write_text
from lib.common.progress import Progress, markdown
from lib.corpus.batches import Corpus, causal_heldout, masked_heldout
from lib.slot_usage.contexts import open_corpus
from lib.slot_usage.counts import evaluate_language_model
from lib.tasks.run_facts import trained_steps
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights

USAGE = ["layers", "MU %", "uniform", "top-1 MU %", "uniform", "KL_u", "KL_w", "effective k",
         "accesses"]
USAGE_CELLS = ["{layer}", "{mu:.1%}", "{mu_uniform:.1%}", "{top1_mu:.1%}", "{top1_mu_uniform:.1%}",
               "{kl_u:.2f}", "{kl_w:.2f}", "{effective_k:.1f}", "{accesses:,.0f}"]


def check_language_models(paths, corpora):
    """Whether the models of `paths` are causal. UserError for one that is fine-tuned, of the other
    kind than the first, or with another vocabulary than a corpus."""
    causal = read_weights(paths[0])["config"].get("causal", False)
    for path in paths:
        saved = read_weights(path)
        if saved.get("head"):
            raise UserError(f"{path}: a fine-tuned checkpoint has no masked-LM head")
        check_objective(path, saved["config"], causal)
        for name in corpora:
            open_corpus(name, path)
    return causal


def test_batches(name, causal, seq_len, batch_size, sequences, maskings):
    """List the batches of a corpus's test split, once for each masking. The windows of a causal
    model overlap by half, and each predicts only what the one before did not."""
    split = Corpus(name), "test", seq_len, batch_size, sequences
    if causal:
        return [causal_heldout(*split, stride=seq_len // 2)]
    return [masked_heldout(*split, masking) for masking in range(maskings)]


def evaluate_run(path, heldout, device, dtype):
    """Evaluate the language model of `path` on the test_batches of corpora: a record for JSON.
    heldout: {name: test_batches}."""
    checkpoint = show_weights(path)
    model = load_model(checkpoint).to(device)
    results = {name: [evaluate_language_model(model, Progress(batches, f"{path}, data/{name}"),
                                              device, dtype)[0] for batches in maskings]
               for name, maskings in heldout.items()}
    steps, seed = trained_steps(checkpoint)
    return {"run": path, "checkpoint": str(checkpoint), "steps": steps, "seed": seed,
            "results": results}


def show_weights(path):
    """Find the weights of `path` (see find_weights), and print where they are."""
    checkpoint, _ = find_weights(path)
    print(f"{path}: weights of {checkpoint}")
    return checkpoint


def perplexity_cell(results):
    """Write the mean perplexity of the maskings, and their range if there are several."""
    values = [result["perplexity"] for result in results]
    spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


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
