"""
Look at trained models: perplexity and memory usage (section 3.2), filled-in masks, curves.

$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py curves out/demo out/demo_more out/demo_resm_init --out curves.png
"""
import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from configs import UserError, atomic, run
from model import MaskedLM, find_weights, load_model, mask_tokens, value_tables
from prepare_data import build_tokenizer, special_tokens


def pack(corpus, tokens, starts, time):
    """Full sequences without padding, each [CLS] + (time - 2) tokens + [SEP], from the places
    `starts` of a flat token array. Returns int64 (len(starts), time)."""
    ids = np.empty((len(starts), time), np.int64)
    ids[:, 0], ids[:, -1] = corpus.cls_id, corpus.sep_id
    ids[:, 1:-1] = tokens[np.asarray(starts)[:, None] + np.arange(time - 2)]
    return ids


def heldout(corpus, split, time, batch_size, sequences):
    """Masked batches of a split: at most `sequences` sequences, evenly spread over it. The masks
    are drawn from a fixed seed, and are the same for every model with this vocabulary.
    Returns a list of (inputs, positions, labels) as mask_tokens gives them."""
    tokens = corpus.split(split)
    available = len(tokens) // (time - 2)
    if not available:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few for one "
                        f"sequence of {time}: take a shorter seq_len or more text")
    chosen = np.linspace(0, available - 1, min(sequences, available)).astype(np.int64)
    masked = mask_tokens(pack(corpus, tokens, chosen * (time - 2), time),
                         np.random.default_rng([0, 0]), corpus.vocab_size,
                         corpus.special_ids, corpus.mask_id)
    return list(zip(*(array.split(batch_size) for array in masked), strict=True))


class Usage:
    """Counts, while it is open, what every memory of a model reads: `with Usage(model) as usage`.

    A read of one head for one token is one access: our reading of the x of section 3.2.
    counts[layer] is a dict of (n_slots,) arrays: `read` (times among the top k), `top1` (times
    the best), `weight` (summed softmax weights), and `topk`. Hooks see nothing inside a compiled
    model: give the raw one.
    """

    def __init__(self, model):
        self.tables, self.counts, self.hooks = value_tables(model), {}, []

    def __enter__(self):
        for layer, table in self.tables.items():
            device = table.weight.device
            device = "cpu" if device.type == "mps" else device  # MPS has no float64
            zeros = torch.zeros(len(table.weight), dtype=torch.int64, device=device)
            self.counts[layer] = {"read": zeros, "top1": zeros.clone(), "weight": zeros.double()}
            self.hooks.append(table.register_forward_hook(self._count(self.counts[layer])))
        return self

    def _count(self, counts):
        def hook(table, inputs, output):
            slots, weights = (part.to(counts["read"].device) for part in inputs[:2])
            flat, n_slots = slots.flatten(), len(table.weight)
            counts["read"] += flat.bincount(minlength=n_slots)
            counts["top1"] += slots[..., 0].flatten().bincount(minlength=n_slots)
            counts["weight"] += flat.bincount(weights.flatten().double(), minlength=n_slots)
            counts["topk"] = slots.shape[-1]
        return hook

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        for counts in self.counts.values():
            for name in ("read", "top1", "weight"):
                counts[name] = counts[name].cpu().numpy()


def write_usage(run, step, counts):
    """<run>/usage/step_<step>.npz: `layer<n>_read` and `layer<n>_top1`, counts per slot."""
    arrays = {f"layer{n}_{name}": layer[name].astype(np.int32)
              for n, layer in counts.items() for name in ("read", "top1")}
    with atomic(Path(run) / "usage" / f"step_{step:06d}.npz") as path, path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def usage_metrics(read, top1, weight, topk):
    """MU, top-1 MU, KL_u and KL_w (section 3.2; shares of 1, nats) from counts per slot, with
    the number of accesses and the two usages that uniform reads would have reached with as many."""
    n_slots, accesses = len(read), int(top1.sum())

    def divergence(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        return float(math.log(n_slots) + (share * np.log(share)).sum())

    def uniform(k):
        return 1 - (1 - k / n_slots) ** accesses

    return {"mu": float((read > 0).mean()), "top1_mu": float((top1 > 0).mean()),
            "kl_u": divergence(read), "kl_w": divergence(weight), "accesses": accesses,
            "mu_uniform": uniform(topk), "top1_mu_uniform": uniform(1)}


@torch.no_grad()
def evaluate(model, batches, device, dtype=torch.float32):
    """Masked-language-model loss (nats), perplexity and accuracy over all masked positions of
    `batches`, and usage_metrics of each memory layer under `layers`. Returns (results, counts)."""
    was_training = model.training
    model.eval()
    sums, total = torch.zeros(2, device=device), 0
    with Usage(model) as usage:
        for inputs, positions, labels in batches:
            total += (labels != -100).sum().item()
            labels = labels.to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(inputs.to(device), positions.to(device)).float()
            sums[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            sums[1] += (logits.argmax(2) == labels).sum()
    model.train(was_training)
    loss, hits = sums.tolist()
    results = {"loss": loss / total, "perplexity": math.exp(min(loss / total, 700)),
               "accuracy": hits / total, "masked_tokens": total,
               "layers": {n: usage_metrics(**counts) for n, counts in usage.counts.items()}}
    return results, usage.counts


def describe(results):
    """The lines that a person reads of evaluate's results."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def load_run(path):
    """(model in evaluation mode, tokenizer, where they are) of a run's folder, a checkpoint or
    weights in Hugging Face layout (see find_weights)."""
    place, vocab = find_weights(path)
    return load_model(place).eval(), build_tokenizer(vocab), place


@torch.no_grad()
def fill(args):
    """The five likeliest words for each [MASK], and the slots that were read there."""
    model, tokenizer, checkpoint = load_run(args.run)
    if not isinstance(model, MaskedLM):
        raise UserError(f"{checkpoint}: fine-tuned: it guesses no words any more")
    *_, first, last, mask = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(first + args.text.replace("[MASK]", mask) + last).ids
    masks = [i for i, token in enumerate(ids) if token == tokenizer.token_to_id(mask)]
    if not masks:
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    reads = {}
    for layer, table in value_tables(model).items():
        table.register_forward_hook(lambda _, inputs, output, layer=layer:
                                    reads.update({layer: inputs[:2]}))
    logits = model(torch.tensor([ids]), torch.tensor([masks]))[0]
    print(f"{checkpoint}: {args.text}")
    for place, probabilities in zip(masks, logits.softmax(1), strict=True):
        best = probabilities.topk(5)
        print(f"[MASK] at token {place}:")
        for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {p:6.1%}  {tokenizer.id_to_token(token)}")
        for layer, (slots, weights) in reads.items():
            print(f"  layer {layer} read, slot (weight), best 3 of "
                  f"{slots.shape[2]} per head:")
            for head, (slot, weight) in enumerate(zip(slots[place], weights[place], strict=True)):
                best3 = zip(slot[:3].tolist(), weight[:3].tolist(), strict=True)
                print(f"    head {head + 1}: " + "  ".join(f"{s} ({w:.2f})" for s, w in best3))


def read_settings(run):
    """config.json of a run: its resolved settings, and where it started."""
    try:
        settings = json.loads((Path(run) / "config.json").read_text())
        if not {"tokenizer_hash", "init_checkpoint", "first_step"} <= settings.keys():
            raise ValueError("not pretrain.py's")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run}/config.json: not readable ({error}): is {run} a run?") from None
    return settings


def read_evaluations(run):
    """The records of a run's log.jsonl that are evaluations; their `step` counts the steps of the
    initial model too."""
    first, path = read_settings(run)["first_step"], Path(run) / "log.jsonl"
    try:  # a running process may be in the middle of the last line
        records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({error})") from None
    found = [{**r, "step": first + r["step"]} for r in records if "perplexity" in r]
    if not found:
        raise UserError(f"{path}: no evaluation in it yet")
    return found


def curves(args):
    """Perplexity against step, and top-1 usage of each memory layer (Figure 3, and what explains
    it): one figure over several runs; their last evaluations as a table on the screen."""
    runs = [(Path(path).name, read_evaluations(path)) for path in args.runs]
    print(f"{'run':24} {'steps':>7} {'perplexity':>10} {'accuracy':>8}  top-1 MU by layer")
    for name, evaluations in runs:
        last = evaluations[-1]
        usage = "  ".join(f"{n}: {m['top1_mu']:.1%}" for n, m in last["layers"].items())
        print(f"{name:24} {last['step']:7,d} {last['perplexity']:10.2f} "
              f"{last['accuracy']:8.1%}  {usage}")
    if args.out:
        draw_curves(runs, Path(args.out))


def draw_curves(runs, out):
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib: pip install matplotlib") from None
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{out}: expected a name that ends in .png, .svg or .pdf")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3))]
    best = min(evaluations[-1]["perplexity"] for _, evaluations in runs)
    for i, (name, evaluations) in enumerate(runs):
        steps = [e["step"] for e in evaluations]
        look = {"color": f"C{i}", "linestyle": styles[i % len(styles)]}
        left.plot(steps, [e["perplexity"] for e in evaluations], label=name, **look)
        for layer, marker in zip(evaluations[-1]["layers"], "os^vDx", strict=False):
            right.plot(steps, [100 * e["layers"][layer]["top1_mu"] for e in evaluations],
                       marker=marker, markersize=4, label=f"{name}, layer {layer}", **look)
    left.set(ylabel="MLM perplexity, held-out text", ylim=(0.95 * best, 2.2 * best))
    right.set(ylabel="top-1 memory usage (%)", ylim=(0, 102))
    for axes in (left, right):
        axes.set_xlabel("training steps, those of the initial model included")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with atomic(out) as temporary:
        figure.savefig(temporary, format=out.suffix[1:], dpi=150)
    print(f"wrote {out}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("fill", help=fill.__doc__)
    command.add_argument("run", help="out/<run>, or one of its checkpoints")
    command.add_argument("text", help="a text with [MASK] in it")
    command.set_defaults(call=fill)
    command = commands.add_parser("curves", help="perplexity and top-1 usage of runs, as a figure")
    command.add_argument("runs", nargs="+", metavar="RUN", help="out/<run>")
    command.add_argument("--out", help="the figure's file: .png, .svg or .pdf")
    command.set_defaults(call=curves)
    args = parser.parse_args(argv)
    args.call(args)


if __name__ == "__main__":
    run(main)
