"""
Prune a memory: keep the value rows that a text reads most.

A pruned memory still has all its slots and finds them as before. Slots whose rows were dropped
share one more row, the mean of the dropped rows, weighted by how much each was read. slot_rows says
which row a slot reads (see pkm.py).

>>> model = load_model("out/demo_resm_init").eval()
>>> counts = training_reads(model, "out/demo_resm_init", "docs", 4096, torch.device("cpu"))
>>> half = prune(model, counts, 0.5)                # its memories have half of the rows
"""
import shutil
from dataclasses import replace

import torch

from lib.common.errors import UserError
from lib.common.files import atomic, check_new_folder, to_json, write_text
from lib.common.progress import Progress
from lib.slot_usage.contexts import corpus_name, open_corpus, training_text
from lib.slot_usage.evaluation import (
    check_language_model,
    evaluate_language_model,
    table_batches,
)
from lib.weights.checkpoint import find_weights, load_model, model_file, read_weights
from lib.weights.run import Run, read_state, save_files
from model import build_model, value_tables

COUNTED = 4096  # sequences of the training text, to count reads in


def batches_of(model, path, name, split, sequences=None):
    """Make the batches of a split of data/<name> that measure.py table makes for this run."""
    return table_batches(model.bert.config.causal, open_corpus(name, path), split,
                         training_text(path)[0], 8, sequences)


def evaluate(model, batches, device, title):
    """Evaluate a model on batches, as evaluate_language_model does, and show how far it is."""
    return evaluate_language_model(model.to(device), Progress(batches, title), device)


def training_reads(model, path, name, sequences, device):
    """Count how much a model reads each row in training text of data/<name>. Returns {layer: sums
    of softmax weights, (rows,)}. In a masked model the tokens to predict are masked."""
    batches = batches_of(model, path, name, "train", sequences)
    _, counts = evaluate(model, batches, device, f"{path}, reads of data/{name}")
    return {layer: torch.from_numpy(sums["weight"]) for layer, sums in counts.items()}


def drop_rows(values, weight, kept):
    """Keep the `kept` rows of largest `weight`, then one row for all others.
    Returns the new values, and which of them each row became, int32 (rows,)."""
    order = weight.argsort(descending=True, stable=True)
    stay, dropped = order[:kept].sort().values, order[kept:]
    became = torch.full((len(values),), kept, dtype=torch.int32)
    became[stay] = torch.arange(kept, dtype=torch.int32)
    share = weight[dropped] + 1e-12  # rows that were never read count alike
    mean = (share / share.sum()) @ values[dropped].double()
    return torch.cat([values[stay], mean[None].to(values.dtype)]), became


def prune(model, counts, keep):
    """Make a model whose memories keep a share of their rows. It shares all other tensors with
    the given model. counts: what training_reads returned."""
    weights = {name: w.detach().cpu() for name, w in model.state_dict().items()}
    n_rows = len(next(iter(counts.values())))
    kept = round(keep * n_rows)
    if kept + 1 >= n_rows:  # nothing gets smaller
        return model
    for layer, weight in counts.items():
        memory = f"bert.layers.{layer - 1}.memory"
        values, became = drop_rows(weights[f"{memory}.values.weight"], weight, kept)
        slot_rows = weights.get(f"{memory}.slot_rows")  # of a model that was pruned before
        weights |= {f"{memory}.values.weight": values,
                    f"{memory}.slot_rows": became if slot_rows is None else became[slot_rows]}
    return with_weights(replace(model.bert.config, n_rows=kept + 1), weights)


def with_weights(config, weights):
    """Build a language model of these tensors, in evaluation mode."""
    with torch.device("meta"):  # needs no memory
        model = build_model(config)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def with_int8_values(model):
    """Make a model whose values are rounded to int8, with a scale for each row."""
    def rounded(values):
        scale = (values.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
        return (values / scale).round() * scale

    weights = {name: rounded(w.detach()) if name.endswith(".values.weight") else w
               for name, w in model.state_dict().items()}
    return with_weights(model.bert.config, weights)


def memory_bytes(model, int8=False):
    """Count the bytes of values and slot_rows. In int8 a row has a scale in float32."""
    total = 0
    for name, w in model.state_dict().items():
        if name.endswith((".values.weight", ".slot_rows")):
            int8_bytes = w.numel() + 4 * len(w) if w.is_floating_point() else w.nbytes
            total += int8_bytes if int8 else w.nbytes
    return total


def prune_run(path, data, shares, sequences, device, out=None):
    """Prune a run to each share of its rows: records for JSON, of the whole model first.

    data: the corpus, None for the run's. Reads are counted in its training text, and perplexity is
    that of its test text. sequences: at most this number of each. A record has perplexity and bytes
    of the memory, also with int8 values. With `out` the last pruned model is written there.
    """
    checkpoint, name = find_run(path, data, shares, out)
    model, records = load_model(checkpoint).eval(), []
    counts = training_reads(model, path, name, sequences or COUNTED, device)
    batches = batches_of(model, path, name, "test", sequences)
    for keep in sorted({1.0, *shares}, reverse=True):
        pruned = prune(model, counts, keep)
        record = {"run": path, "data": name, "keep": keep,
                  "rows": len(next(iter(value_tables(pruned).values())).weight),
                  "model_bytes": sum(w.nbytes for w in pruned.state_dict().values())}
        for kind, tested in (("float32", pruned), ("int8", with_int8_values(pruned))):
            results, _ = evaluate(tested, batches, device, f"{path}, {keep:.1%}, {kind}")
            record |= {f"{kind}_perplexity": results["perplexity"],
                       f"{kind}_bytes": memory_bytes(pruned, kind == "int8")}
        records.append(record)
    if out:
        write_run(out, checkpoint, pruned, device)
    return records


def find_run(path, data, shares, out):
    """Find the weights' folder and the corpus's name. UserError if the run cannot be pruned."""
    if bad := [keep for keep in shares if not 0 < keep <= 1]:
        raise UserError(f"--keep {bad[0]:g}: expected a share of the rows, over 0 and at most 1")
    checkpoint, _ = find_weights(path)
    config = read_weights(checkpoint)["config"]
    check_language_model(path, config.causal)
    if not (config.memory_layers and config.beta):
        raise UserError(f"{path}: a model without memory has nothing to prune")
    name = corpus_name(path, data)
    if out:
        check_new_folder(out)
        if len(shares) > 1:
            raise UserError(f"--out {out}: one run with one --keep")
        if not (checkpoint / "state.pt").is_file():
            raise UserError(f"{path}: --out needs a run of pretrain.py")
        open_corpus(training_text(path)[1], path)  # its validation text is evaluated at the end
    return checkpoint, name


def write_run(folder, checkpoint, model, device):
    """Write a pruned model as a run, whole or not at all. Its log is the checkpoint's, and one more
    evaluation, of the pruned model. There are no moments: its training cannot go on."""
    run, step = Run(checkpoint.parent), read_state(checkpoint)["step"]
    settings = run.settings(["dataset", "eval_sequences"])
    batches = batches_of(model, checkpoint, settings["dataset"], "val", settings["eval_sequences"])
    results, _ = evaluate(model, batches, device, f"{folder}, validation text")
    log = [record for record in run.records() if record["step"] <= step]
    settings |= {"n_rows": model.bert.config.n_rows, "pruned_from": str(checkpoint)}
    with atomic(folder) as temporary:
        weights = temporary / checkpoint.name
        save_files(weights, {"model": model_file(model.cpu())})
        for file in ("vocab.txt", "tokenizer.json"):
            if (run.folder / file).is_file():
                shutil.copyfile(run.folder / file, temporary / file)
        write_text(temporary / "config.json", to_json(settings, indent=1))
        write_text(temporary / "log.jsonl",
                   "".join(f"{to_json(record)}\n" for record in [*log, {"step": step, **results}]))
        shutil.copyfile(checkpoint / "state.pt", weights / "state.pt")
    rows = len(next(iter(value_tables(model).values())).weight)
    print(f"wrote {folder}: {rows:,} rows a layer")
