"""
Evaluate language models on held-out text: perplexity, accuracy, slot usage.
"""
import math

import torch
import torch.nn.functional as F

from lib.common.errors import UserError
from lib.common.progress import Progress
from lib.corpus.batches import causal_heldout, masked_heldout
from lib.distributed.processes import deal_batches, sum_over_ranks
from lib.slot_usage.contexts import open_corpus, training_text
from lib.slot_usage.counts import count_reads, usage_metrics
from lib.training.trainer import autocast, to_device
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights
from lib.weights.run import Run


@torch.no_grad()
def evaluate_language_model(model, batches, device, dtype=torch.float32):
    """Evaluate a language model on batches of masked_heldout or causal_heldout. Returns (results,
    the counts of count_reads). results: loss (nats), perplexity and accuracy over all predicted
    positions; masked_tokens, their number; layers, {layer: usage_metrics}. With n_rows, the usage
    counts the rows of a pruned memory, not slots. A compiled model is run as its raw module."""
    model = getattr(model, "_orig_mod", model)
    was_training = model.training
    model.eval()
    loss = correct = masked = 0
    with count_reads(model) as counts:
        for batch in deal_batches(batches):
            batch = to_device(batch, device)
            labels = batch.pop("labels").flatten()
            with autocast(device, dtype):
                logits = model(**batch)
            logits = logits.flatten(0, 1).float()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            masked += (labels != -100).sum().item()
    model.train(was_training)
    loss, correct, masked = map(sum_over_ranks, (loss, correct, masked))
    if not masked:
        raise UserError("the held-out text has no word to predict: more text, or more of it held "
                        "out (prepare_data.py text --val_every)")
    results = {"loss": loss / masked, "perplexity": math.exp(min(loss / masked, 700)),
               "accuracy": correct / masked, "masked_tokens": masked,
               "layers": {n: usage_metrics(**sums) for n, sums in counts.items()}}
    if n_rows := model.bert.config.n_rows:
        results["n_rows"] = n_rows
    return results, counts


def describe_evaluation(results):
    """Yield the results of evaluate_language_model as lines to print."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)


def check_same_text(paths):
    """Return the corpus of pretrained runs; UserError if their perplexities are of other texts."""
    what = {"tokenizer_hash": "vocabulary", "dataset": "corpus", "objective": "objective",
            "seq_len": "sequence length"}
    runs = [Run(path).settings(what) for path in paths]
    what["data"] = "text of the same name"  # runs of older versions do not say
    for path, settings in zip(paths, runs, strict=True):
        for key, name in what.items():
            if settings.get(key, runs[0].get(key)) != runs[0].get(key, settings.get(key)):
                raise UserError(f"{path} has another {name} than {paths[0]}: their perplexities "
                                "cannot be compared")
    return runs[0]["dataset"]


def comparable_evaluations(paths):
    """Read the evaluations of pretrained runs: (corpus, {path: evaluations}). UserError if they
    are of other texts, or the last ones of other sequences."""
    corpus, runs = check_same_text(paths), {path: Run(path).evaluations() for path in paths}
    first = runs[paths[0]][-1]["masked_tokens"]
    for path, evaluations in runs.items():
        if (tokens := evaluations[-1]["masked_tokens"]) != first:
            raise UserError(f"{path} was evaluated on {tokens:,} tokens, {paths[0]} on {first:,}: "
                            "their perplexities cannot be compared (eval_sequences)")
    return corpus, runs


def table_batches(causal, corpus, split, seq_len, batch_size, sequences, masking=0):
    """Make the batches on which tables measure perplexity. Windows of causal models overlap by
    half, and each token is predicted once. masking: the number of a random masking."""
    text = corpus, split, seq_len, batch_size, sequences
    if causal:
        return causal_heldout(*text, stride=seq_len // 2)
    return masked_heldout(*text, masking)


def evaluate_runs(paths, corpora, device, dtype, batch_size, sequences=None, maskings=1):
    """Evaluate language models on the same batches of corpora's test splits (see table_batches). At
    most `sequences` sequences of each split are read, of the shortest length that a model was
    trained on. Returns (sequence length, records for JSON)."""
    causal = read_weights(paths[0])["config"].causal
    if causal and maskings > 1:
        raise UserError(f"--repeats {maskings}: a causal model has no maskings to repeat")
    for path in paths:  # report mistakes before the long work starts
        check_language_model(path, causal)
    seq_len = min(training_text(path)[0] for path in paths)
    heldout, records = {}, []
    for name in corpora:
        text = open_corpus(name, *paths), "test", seq_len, batch_size, sequences
        heldout[name] = [table_batches(causal, *text, masking) for masking in range(maskings)]
    for path in paths:
        checkpoint, _ = find_weights(path)
        print(f"{path}: weights of {checkpoint}")
        model = load_model(checkpoint).to(device)
        results = {name: [] for name in corpora}
        for name, drawn in heldout.items():
            for batches in drawn:
                batches = Progress(batches, f"{path}, data/{name}")
                evaluation, _ = evaluate_language_model(model, batches, device, dtype)
                results[name].append(evaluation)
        trained = Run(checkpoint.parent).steps_and_seed(checkpoint)
        records.append({"run": path, "checkpoint": str(checkpoint), **trained,
                        "n_rows": read_weights(checkpoint)["config"].n_rows, "results": results})
    return seq_len, records
