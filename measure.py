"""
Look inside trained models: the memory numbers and figures of Kim & Jung (2020), from run folders.

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py slots out/demo_resm_init --layer 2           # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py table out/base_resm_init_sst2               # Table 6
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4

--out NAME keeps the table as NAME.md, its numbers as NAME.json, a figure as NAME.png and NAME.svg.
"""
import argparse
import contextlib
import itertools
import json
import math
import re
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import monotonic

import numpy as np
import torch
import torch.nn.functional as F

import tasks
from configs import Parser, UserError, atomic, need, run, setup, whole
from model import MaskedLM, find_weights, load_model, mask_tokens, read_weights, value_tables
from prepare_data import Corpus, build_tokenizer, read_vocab, special_tokens


def pack(corpus, tokens, starts, time):
    """Full sequences without padding, each [CLS] + (time - 2) tokens + [SEP], from the places
    `starts` of a flat token array. Returns int64 (len(starts), time)."""
    ids = np.empty((len(starts), time), np.int64)
    ids[:, 0], ids[:, -1] = corpus.cls_id, corpus.sep_id
    ids[:, 1:-1] = tokens[np.asarray(starts)[:, None] + np.arange(time - 2)]
    return ids


def cut(corpus, split, time, sequences=None):
    """A split in sequences, int64 (sequences, time): all of it, the last one padded, or at most
    `sequences` full ones, evenly spread over it."""
    tokens, width = corpus.split(split), time - 2
    full = len(tokens) // width
    chosen = np.linspace(0, full - 1, min(sequences or full, full)).astype(np.int64)
    ids, rest = pack(corpus, tokens, chosen * width, time), tokens[full * width:]
    if sequences is None and len(rest):
        last = np.array([[corpus.cls_id, *rest, corpus.sep_id]])
        return np.concatenate([ids, np.pad(last, ((0, 0), (0, width - len(rest))),
                                           constant_values=corpus.pad_id)])
    if not full:
        raise UserError(f"data/{corpus.name}/{split}.bin: {len(tokens)} tokens are too few for one "
                        f"sequence of {time}: take a shorter seq_len or more text")
    return ids


def heldout(corpus, split, time, batch_size, sequences=None, masking=0):
    """Masked batches of a split that is cut by cut(): a list of (inputs, positions, labels), as
    mask_tokens gives them, and mask: (batch, time) bool, True at real tokens, None where all are.
    What is masked depends on the seed `masking`, the text and the vocabulary, on nothing else."""
    def draw(ids):
        return mask_tokens(ids, rng, corpus.vocab_size, corpus.special_ids, corpus.mask_id)

    ids, rng = cut(corpus, split, time, sequences), np.random.default_rng([0, masking])
    real = torch.from_numpy(ids != corpus.pad_id)
    full, length = int(real.all(1).sum()), int(real[-1].sum())
    parts = (part.split(batch_size) for part in draw(ids[:full]))
    batches = [(*batch, None) for batch in zip(*parts, strict=True)] if full else []
    if length < time:  # 15% of its own tokens are masked, then it is padded
        inputs, positions, labels = draw(ids[-1:, :length])
        inputs = F.pad(inputs, (0, time - length), value=corpus.pad_id)
        batches.append((inputs, positions, labels, real[-1:]))
    return batches


def progress(batches, what):
    """The batches, one by one; every 10 s stderr says how far they are."""
    start = shown = monotonic()
    for done, batch in enumerate(batches, 1):
        yield batch
        if (now := monotonic()) - shown > 10:
            eta, shown = timedelta(seconds=round((now - start) * (len(batches) / done - 1))), now
            print(f"{what}: {done:,} of {len(batches):,} batches, ETA {eta}", file=sys.stderr)


@contextlib.contextmanager
def watch(model, see):
    """While it is open, see(layer, slots, weights) is called with all that the memories of a model
    read: (tokens, heads, topk) both, best first; padding is never looked up. Hooks see nothing
    inside a compiled model: call the raw one."""
    hooks = [table.register_forward_hook(
        lambda table, inputs, output, layer=layer: see(layer, *inputs[:2]))
        for layer, table in value_tables(model).items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def count_reads(model):
    """Counts, while it is open, what every memory of a model reads: `with count_reads(model) as
    counts`. A read of one head for one token is one access: our reading of the x of section 3.2.

    counts[layer] is a dict of (n_slots,) arrays, `read` (times among the top k), `top1` (times the
    best) and `weight` (summed softmax weights), of `topk`, and of `effective_k`: exp(entropy) of an
    access's weights, 1 where one slot has it all, topk where they are equal; summed too.
    """
    counts = {}
    for layer, table in value_tables(model).items():
        device = table.weight.device
        device = "cpu" if device.type == "mps" else device  # MPS has no float64
        zeros = torch.zeros(len(table.weight), dtype=torch.int64, device=device)
        counts[layer] = {"read": zeros, "top1": zeros.clone(), "weight": zeros.double(),
                         "effective_k": zeros[0].double()}

    def count(layer, slots, weights):
        own = counts[layer]
        slots, weights = slots.to(own["read"].device), weights.to(own["read"].device)
        flat, n_slots = slots.flatten(), len(own["read"])
        own["read"] += flat.bincount(minlength=n_slots)
        own["top1"] += slots[..., 0].flatten().bincount(minlength=n_slots)
        own["weight"] += flat.bincount(weights.flatten().double(), minlength=n_slots)
        own["effective_k"] += torch.special.entr(weights).sum(-1).exp().sum(dtype=torch.float64)
        own["topk"] = slots.shape[-1]

    with watch(model, count):
        yield counts
    for own in counts.values():
        own.update({name: own[name].cpu().numpy() for name in ("read", "top1", "weight")},
                   effective_k=own["effective_k"].item())


def write_usage(run, step, counts):
    """<run>/usage/step_<step>.npz: `layer<n>_read` and `layer<n>_top1`, counts per slot."""
    arrays = {f"layer{n}_{name}": layer[name].astype(np.int32)
              for n, layer in counts.items() for name in ("read", "top1")}
    with atomic(Path(run) / "usage" / f"step_{step:06d}.npz") as path, path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_usage(run):
    """What write_usage wrote, oldest first: {step: {"layer2_top1": (n_slots,) counts, ...}}."""
    if not read_settings(run, ["memory_layers"])["memory_layers"]:
        raise UserError(f"{run}: a run without memory has no usage snapshots")
    files = sorted(Path(run, "usage").glob("step_*.npz"), key=lambda path: int(path.stem[5:]))
    if not files:
        raise UserError(f"{run}/usage: no snapshot yet: there is one every usage_interval steps")
    return {int(path.stem[5:]): dict(np.load(path)) for path in files}


def usage_metrics(read, top1, weight, topk, effective_k):
    """MU, top-1 MU, KL_u and KL_w (section 3.2; shares of 1, nats) from count_reads' counts, the
    mean effective k of an access, their number, and the two usages that uniform reads would have
    reached with as many."""
    n_slots, accesses = len(read), int(top1.sum())

    def divergence(counts):
        share = counts[counts > 0] / counts.sum()  # 0 log 0 = 0
        return float(math.log(n_slots) + (share * np.log(share)).sum())

    def uniform(k):
        return 1 - (1 - k / n_slots) ** accesses

    return {"mu": float((read > 0).mean()), "top1_mu": float((top1 > 0).mean()),
            "kl_u": divergence(read), "kl_w": divergence(weight),
            "effective_k": effective_k / accesses, "accesses": accesses,
            "mu_uniform": uniform(topk), "top1_mu_uniform": uniform(1)}


@torch.no_grad()
def evaluate(model, batches, device, dtype=torch.float32):
    """Masked-language-model loss (nats), perplexity and accuracy over all masked positions of
    `batches` (see heldout), and usage_metrics of each memory layer under `layers`. A compiled model
    is measured through its raw module. Returns (results, counts)."""
    model = getattr(model, "_orig_mod", model)
    was_training = model.training
    model.eval()
    loss = hits = total = 0
    with count_reads(model) as counts:
        for inputs, positions, labels, mask in batches:
            labels = labels.to(device).flatten()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(inputs.to(device), positions.to(device),
                               mask=None if mask is None else mask.to(device))
            logits = logits.flatten(0, 1).float()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            hits += (logits.argmax(1) == labels).sum().item()
            total += (labels != -100).sum().item()
    model.train(was_training)
    results = {"loss": loss / total, "perplexity": math.exp(min(loss / total, 700)),
               "accuracy": hits / total, "masked_tokens": total,
               "layers": {n: usage_metrics(**layer) for n, layer in counts.items()}}
    return results, counts


def describe(results):
    """The lines that a person reads of evaluate's results."""
    yield f"perplexity {results['perplexity']:.2f}, accuracy {results['accuracy']:.1%}"
    for layer, m in results["layers"].items():
        yield (f"layer {layer}: MU {m['mu']:.1%} (uniform use: {m['mu_uniform']:.1%}), top-1 MU "
               f"{m['top1_mu']:.1%} ({m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, "
               f"KL_w {m['kl_w']:.2f}, {m['accesses']:,} accesses")


def read_settings(run, needed=()):
    """config.json of a run: its resolved settings, and where it started. UserError where it lacks
    one of the `needed`, as a fine-tuned run does those of pretraining."""
    try:
        settings = json.loads((Path(run) / "config.json").read_text())
        if not {"tokenizer_hash", "init_checkpoint", "first_step"} <= settings.keys():
            raise ValueError("not pretrain.py's")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run}/config.json: not readable ({error}): is {run} a run?") from None
    if lacking := [key for key in needed if key not in settings]:
        raise UserError(f"{run}: a fine-tuned run has no {lacking[0]}: expected one of pretraining")
    return settings


def check_same_run(config, run, may_change):
    """Refuse to continue a run under settings (a dataclass) that make it another one; say which of
    those that may change did."""
    before, now = read_settings(run), json.loads(json.dumps(asdict(config)))
    for key in sorted(key for key in now if now[key] != before.get(key)):
        if key not in may_change:
            raise UserError(f"{run} was trained with {key} = {before.get(key)!r}, not "
                            f"{now[key]!r}: give the changed run its own --out=out/NAME")
        if key not in ("dry_run", "eval_only"):
            print(f"{key} was {before.get(key)!r}, is now {now[key]!r}"
                  + ", where the learning rate reaches 0" * (key == "max_steps"))


def load_run(path):
    """(model in evaluation mode, tokenizer, where they are) of a run's folder, a checkpoint or
    weights in Hugging Face layout (see find_weights)."""
    place, vocab = find_weights(path)
    return load_model(place).eval(), build_tokenizer(vocab), place


def trained_on(path):
    """The length of the sequences that a model was trained on, and the name of the corpus; of
    weights in Hugging Face layout the number of positions, and None."""
    place, _ = find_weights(path)
    if (place / "model.pt").is_file():
        settings = read_settings(place.parent, ["seq_len", "dataset"])
        return settings["seq_len"], settings["dataset"]
    return read_weights(place)["config"]["max_len"], None


def open_corpus(name, path):
    """The corpus data/<name>, which must have the vocabulary of the run `path`."""
    corpus, (_, vocab) = Corpus(name), find_weights(path)
    if read_vocab(corpus.folder) != read_vocab(vocab):
        raise UserError(f"{path} has another vocabulary than data/{name}: prepare the corpus with "
                        f"--vocab {vocab}, or leave one of them out")
    return corpus


def report(header, rows, note, data, out):
    """Print a table in Markdown and a note on it; with `out`, keep them as <out>.md and `data` as
    <out>.json."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    text = "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in rows)
    text += f"\n{note}\n"
    print(text, end="")
    for suffix, content in ((".md", text), (".json", json.dumps(data, indent=1) + "\n")):
        if out:
            with atomic(out + suffix) as temporary:
                temporary.write_text(content, encoding="utf-8")
            print(f"wrote {out}{suffix}")


def table(args):
    """Table 2: perplexity on each corpus, and the usage of each memory layer on one of them. Of
    fine-tuned runs Table 6: the usage on their own task."""
    tuned = [path for path in args.runs if find_seeds(path)]
    if tuned and len(tuned) < len(args.runs) or bool(tuned) == bool(args.data):
        raise UserError("table takes runs of pretraining with --data NAME, or fine-tuned runs "
                        "without")
    if tuned:
        return table_of_tasks(args)
    usage_data = args.usage_data or args.data[0]
    names = list(dict.fromkeys([*args.data, usage_data]))
    for path in args.runs:  # mistakes come before the long work
        if read_weights(path).get("head"):
            raise UserError(f"{path}: fine-tuned: it guesses no words any more")
        for name in names:
            open_corpus(name, path)
    time = min(trained_on(path)[0] for path in args.runs)
    device, dtype = setup(args.device, args.dtype)
    runs, rows = [], []
    for number, path in enumerate(args.runs, 1):
        model, _, checkpoint = load_run(path)
        model, results = model.to(device), {name: [] for name in names}
        for name, masking in itertools.product(names, range(args.repeats)):
            batches = heldout(Corpus(name), "test", time, args.batch_size, args.sequences, masking)
            what = f"{path} ({number} of {len(args.runs)}), data/{name}, masking {masking + 1}"
            results[name].append(evaluate(model, progress(batches, what), device, dtype)[0])
        runs.append({"run": path, "checkpoint": str(checkpoint), "results": results})
        rows.append([path, *cells(results, args.data, usage_data)])
        del model  # before the next one is loaded
    header = ["run", "layers", *(name for name, *_ in COLUMNS), *(f"{d} ppl" for d in args.data)]
    note = (f"Test splits, {args.sequences or 'all'} sequences of {time}; usage on data/{usage_data}"
            + f"; mean [lowest, highest] of {args.repeats} maskings" * (args.repeats > 1) + ".")
    report(header, rows, note, {"note": note, "usage_data": usage_data, "runs": runs}, args.out)


COLUMNS = [("MU %", "mu", ".1f", 100), ("uniform", "mu_uniform", ".1f", 100),
           ("top-1 MU %", "top1_mu", ".1f", 100), ("uniform", "top1_mu_uniform", ".1f", 100),
           ("KL_u", "kl_u", ".2f", 1), ("KL_w", "kl_w", ".2f", 1),
           ("effective k", "effective_k", ".1f", 1), ("accesses", "accesses", ",.0f", 1)]


def cells(results, data, usage_data):
    """A run's cells of the table; results: {corpus: evaluate's results, one for each masking}."""
    usage = [masking["layers"] for masking in results[usage_data]]
    yield "/".join(map(str, usage[0])) or "-"
    for _, key, form, scale in COLUMNS:
        means = [scale * np.mean([layers[n][key] for layers in usage]) for n in usage[0]]
        same = key.endswith("uniform") or key == "accesses"  # for all layers: stands once
        yield "/".join(f"{mean:{form}}" for mean in means[:1 if same else None]) or "-"
    for name in data:
        found = [masking["perplexity"] for masking in results[name]]
        spread = f" [{min(found):.2f}, {max(found):.2f}]" if len(found) > 1 else ""
        yield f"{np.mean(found):.2f}{spread}"


def find_seeds(path):
    """The folders of a fine-tuned run's seeds, the folder itself if it is one of them; [] where
    there is none."""
    folders = [Path(path), *sorted(Path(path).glob("seed*"), key=lambda p: (len(p.name), p.name))]
    files = ((p, p / "config.json") for p in folders)
    return [p for p, file in files if file.is_file() and '"task":' in file.read_text()]


def open_task(path, name, split, most):
    """Of a run and a task, by default the one that it is fine-tuned on: the run's settings, where
    its (first seed's, best) model is, its tokenizer, Examples of a split, and which to read: `most`
    at most, evenly spread, in batches of about one length."""
    run = find_seeds(path)
    settings = read_settings(run[0]) if run else {}
    place, vocab = find_weights(run[0] / "best" if run else path)
    tokenizer, task = build_tokenizer(vocab), tasks.find(name or settings["task"])
    if task.labels is None and split != "train" and task.name != "squad":
        tasks.read(task, "train")  # its labels
    split = split if split == "train" else next(iter(task.dev.values()))
    examples = tasks.examples(task, split, tokenizer, settings.get("max_len", 128),
                              settings.get("doc_stride", 128))
    chosen = np.linspace(0, len(examples.ids) - 1, min(most or math.inf, len(examples.ids)))
    chosen = chosen.astype(int)
    batches = [chosen[part] for part in tasks.batches(examples.lengths[chosen], 32)]
    return settings, place, task, tokenizer, examples, batches


@torch.no_grad()
def read_examples(model, examples, batches, tokenizer, device, what):
    """count_reads of a model in evaluation mode over batches of Examples."""
    pad_id, model = tasks.special_ids(tokenizer)[0], model.to(device).eval()
    with count_reads(model) as counts:
        for index in progress(batches, what):
            ids, types, lengths = map(torch.from_numpy, examples.pad(index, pad_id))
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            model.bert(*(part.to(device) for part in (ids, mask, types)))
    return counts


def table_of_tasks(args):
    """Table 6: usage of the best epoch's model of each run, on its task."""
    rows, found, (device, _) = [], [], setup(args.device, "float32")
    for path in args.runs:
        settings, best, _, tokenizer, examples, batches = open_task(path, None, args.split,
                                                                    args.sequences)
        counts = read_examples(load_model(best), examples, batches, tokenizer, device, path)
        layers = {n: usage_metrics(**layer) for n, layer in counts.items()}
        n_read = sum(map(len, batches))
        found.append({"run": path, "checkpoint": str(best), "task": settings["task"],
                      "examples": n_read, "layers": layers})
        rows.append([path, settings["task"], f"{n_read:,}", *cells({"": [found[-1]]}, [], "")])
    report(["run", "task", "examples", "layers", *(name for name, *_ in COLUMNS)], rows,
           f"After fine-tuning, {args.split} split, nothing masked, padding not counted.",
           found, args.out)


# What Table 4 shows of each task, then what it leaves out; SQuAD's are in percent already.
SCORES = {"squad": ("SQuAD 1.1 (EM/F1)", ("exact_match", "f1")),
          "mnli": ("MNLI-(m/mm)", ("accuracy", "accuracy_mm")), "qqp": ("QQP", ("accuracy",)),
          "qnli": ("QNLI", ("accuracy",)), "sst2": ("SST-2", ("accuracy",)),
          "cola": ("CoLA (Matt)", ("matthews_correlation",)),
          "mrpc": ("MRPC (Acc/F1)", ("accuracy", "f1")),
          "stsb": ("STS-B (P/S)", ("pearson", "spearmanr")), "rte": ("RTE", ("accuracy",))}
AVERAGED = ("mnli", "qqp", "qnli", "sst2", "cola")  # six columns: MNLI's m and mm are two


def glue(args):
    """Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    runs = {}  # (initial model, was the memory updated): {task: [each seed's eval_results.json]}
    for path in args.runs:
        done = [p for p in find_seeds(path) if (p / "eval_results.json").is_file()]
        if not done:
            raise UserError(f"{path}: no fine-tuned run that is done")
        for folder in done:
            settings = read_settings(folder)
            task = tasks.name_of(settings["task"])
            system = settings["init_from"], settings["update_memory"]
            results = json.loads((folder / "eval_results.json").read_text())
            runs.setdefault(system, {}).setdefault(task, {})[settings["seed"]] = results
    others = sorted({task for own in runs.values() for task in own} - SCORES.keys())
    columns = [*list(SCORES)[:6], *(t for t in [*list(SCORES)[6:], *others]
                                    if any(t in own for own in runs.values()))]
    rows, found = [], []
    for (name, updated), own in runs.items():
        medians = {}
        for task, each in own.items():
            keys = SCORES.get(task, ("", ("accuracy", "pearson")))[1]
            medians[task] = [(1 if task == "squad" else 100) * float(np.median(
                [results[f"eval_{key}"] for results in each.values()]))
                for key in keys if f"eval_{key}" in next(iter(each.values()))]
        six = [value for task in AVERAGED for value in medians.get(task, [])]
        average = float(np.mean(six)) if len(six) == 6 else None
        shown = {task: "/".join(f"{value:.1f}" for value in values)
                 for task, values in medians.items()}
        seeds = sorted({len(each) for each in own.values()})
        found.append({"init_from": name, "update_memory": updated, "median": medians,
                      "average": average, "seeds": own})
        rows.append([name, "YN"[not updated], "-".join(map(str, dict.fromkeys(
            [seeds[0], seeds[-1]]))), *(shown.get(task, "-") for task in columns[:6]),
            "-" if average is None else f"{average:.1f}",
            *(shown.get(task, "-") for task in columns[6:])])
    titles = [SCORES.get(task, (task,))[0] for task in columns]
    report(["initial model", "memory update", "seeds", *titles[:6], "Avg", *titles[6:]], rows,
           "Dev splits, median over the seeds of each seed's best epoch; -: not run. Avg: of the "
           "six columns from MNLI-m to CoLA, once all are there.", found, args.out)


def class_distances(positive, negative):
    """Figure 4 of two (n_slots,) arrays of top-1 counts: KL(positive || negative) in nats, one
    added to every count so that no slot has share 0, and IOU: the sum of the smaller shares over
    that of the larger ones. Which direction, and smoothing: our reading."""
    p, q = ((t + 1) / (t + 1).sum() for t in (positive, negative))
    kl = float((p * np.log(p / q)).sum())
    p, q = (t / t.sum() for t in (positive, negative))
    return {"kl": kl, "iou": float(np.minimum(p, q).sum() / np.maximum(p, q).sum())}


def by_class(args):
    """Figure 4: how much the slots differ that a task's two classes read, before and after
    fine-tuning."""
    found, (device, _) = [], setup(args.device, "float32")
    for path in args.runs:
        tuned = bool(find_seeds(path))
        if not (tuned or args.data):
            raise UserError(f"{path}: not a fine-tuned run: it takes --data TASK")
        settings, place, task, tokenizer, examples, batches = open_task(
            path, args.data, args.split, args.sequences)
        names = task.labels or []
        if len(names) != 2:
            raise UserError(f"{task.name} has {len(names)} classes, expected two")
        initial = settings["init_checkpoint"] if tuned else place
        for when, weights in [("before", initial), ("after", place)][:2 if tuned else 1]:
            model, counts = load_model(weights), []
            for label in (1, 0):
                own = [index[examples.labels[index] == label] for index in batches]
                counts.append(read_examples(model, examples, [index for index in own if len(index)],
                                            tokenizer, device, f"{path}, {when}, {names[label]}"))
            for n in counts[0]:
                tops = [each[n]["top1"] for each in counts]
                found.append({"run": path, "when": when, "layer": n, **class_distances(*tops),
                              "accesses": [int(top1.sum()) for top1 in tops]})
    if not found:
        raise UserError(f"{args.runs[0]}: a model without memory has no slots to compare")
    report(["run", "layer", "when", "KL", "IOU", "accesses"],
           [[own["run"], own["layer"], own["when"], f"{own['kl']:.3f}", f"{own['iou']:.3f}",
             " + ".join(f"{n:,}" for n in own["accesses"])] for own in found],
           f"Top-1 slots, {args.split} split: KL(class 1 || class 0) in nats with one added to "
           "every count, IOU of the normalised counts; accesses of class 1 + class 0.", found,
           args.out)
    if args.out:
        draw_classes(found, args.out)


def draw_classes(found, out):
    """Before and after side by side, for every run and layer."""
    figure, [panels] = subplots(1, 2, figsize=(10, 3.8))
    bars = list(dict.fromkeys((own["run"], own["layer"]) for own in found))
    names = [f"{Path(run).name}\nlayer {layer}" for run, layer in bars]
    for axes, key, label in zip(panels, ("kl", "iou"), ("KL (nats)", "IOU"), strict=True):
        for shift, when, color in ((-0.2, "before", "white"), (0.2, "after", "C0")):
            own = [own for own in found if own["when"] == when]
            places = [bars.index((each["run"], each["layer"])) + shift for each in own]
            drawn = axes.bar(places, [each[key] for each in own], 0.4, edgecolor="black",
                             label=f"{when} fine-tuning", color=color)
            axes.bar_label(drawn, fmt="%.2f", fontsize=7)
        axes.set_xticks(range(len(bars)), names, fontsize=8)
        axes.set(ylabel=label)
        axes.margins(y=0.12)
    panels[0].legend(fontsize=8)
    save_figure(figure, out)


def last_used(snapshots):
    """(1 + snapshots,) slots by the last of several (n_slots,) top-1 counts, oldest first, that is
    above 0 for them; slots that were never top-1 come first."""
    last = np.zeros(len(snapshots[0]), int)
    for number, top1 in enumerate(snapshots, 1):
        last[top1 > 0] = number
    return np.bincount(last, minlength=len(snapshots) + 1)


def staleness(args):
    """Figure 2: how many slots were top-1 for the last time at which usage snapshot of a run."""
    found = []
    for path in args.runs:
        snapshots = read_usage(path)
        for n in read_settings(path)["memory_layers"]:
            top1 = [arrays[f"layer{n}_top1"] for arrays in snapshots.values()]
            share = (last_used(top1) / len(top1[0])).tolist()
            found.append({"run": path, "layer": n, "accesses": int(top1[-1].sum()),
                          "slots": dict(zip(["never", *snapshots], share, strict=True))})
    bars = ["never", *sorted({step for own in found for step in list(own["slots"])[1:]})]
    report(["run", "layer", "accesses", *bars],
           [[own["run"], own["layer"], f"{own['accesses']:,}",
             *(f"{own['slots'][bar]:.1%}" if bar in own["slots"] else "" for bar in bars)]
            for own in found],
           "Share of the slots by the step of the last snapshot at which they were top-1. Accesses: "
           "in a snapshot.", found, args.out)
    if args.out:
        draw_staleness(found, args.out)


def subplots(*shape, **settings):
    need("matplotlib", "a figure").use("Agg")
    pyplot = need("matplotlib.pyplot", "a figure")
    return pyplot.subplots(*shape, squeeze=False, layout="constrained", **settings)


def save_figure(figure, out):
    for suffix in (".png", ".svg"):
        with atomic(out + suffix) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=150)
        print(f"wrote {out}{suffix}")


def draw_staleness(found, out):
    """A panel for each run and layer: runs may have different snapshots."""
    columns = len({own["layer"] for own in found})
    figure, panels = subplots(-(-len(found) // columns), columns, sharey=True,
                              figsize=(5.5 * columns, 0.5 + 1.6 * len(found) / columns))
    for own, axes in zip(found, panels.flat, strict=False):
        axes.set_title(f"{Path(own['run']).name}, layer {own['layer']}", fontsize=9)
        bars, shares = zip(*own["slots"].items(), strict=True)
        drawn = axes.bar([str(bar) for bar in bars], [100 * share for share in shares],
                         color=["white"] + ["C0"] * (len(bars) - 1), edgecolor="black")
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
        axes.margins(y=0.15)
        axes.tick_params(labelsize=8)
    figure.supxlabel("step of the last snapshot at which a slot was top-1", fontsize=10)
    figure.supylabel("slots (%)", fontsize=10)
    save_figure(figure, out)


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
    """Figure 3: perplexity against step, and beside it top-1 usage, for several runs."""
    settings = [read_settings(path, ["dataset"]) for path in args.runs]
    for path, own in zip(args.runs, settings, strict=True):
        if any(own[key] != settings[0][key] for key in ("tokenizer_hash", "dataset")):
            raise UserError(f"{path} has another vocabulary or corpus than {args.runs[0]}: their "
                            "perplexities cannot be compared")
    found = {path: read_evaluations(path) for path in args.runs}
    rows = []
    for path, evaluations in found.items():
        first, last = evaluations[0], evaluations[-1]
        usage = "/".join(f"{100 * m['top1_mu']:.1f}" for m in last["layers"].values())
        rows.append([path, f"{last['step']:,}", *(f"{e['perplexity']:.2f}" for e in (first, last)),
                     f"{last['accuracy']:.1%}", "/".join(last["layers"]) or "-", usage or "-"])
    report(["run", "steps", "first ppl", "last ppl", "accuracy", "layers", "top-1 MU %"], rows,
           f"Held-out text of data/{settings[0]['dataset']}; the steps of the initial model count.",
           found, args.out)
    if args.out:
        draw_curves(found, args.out)


# Okabe and Ito's colours, neighbours of different lightness, each with a line style of its own
LOOKS = [{"color": color, "linestyle": style} for color, style in zip(
    ("black", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"),
    ("-", "--", "-.", ":", (0, (10, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4))), strict=True)]


def draw_curves(found, out):
    """Zoomed to low perplexity: up to where the runs that go on from another model start."""
    figure, [[left, right]] = subplots(1, 2, figsize=(11, 4.2))
    low = min(evaluations[-1]["perplexity"] for evaluations in found.values())
    top = 1.05 * max([2 * low, *(e[0]["perplexity"] for e in found.values() if e[0]["step"])])
    for (path, evaluations), look in zip(found.items(), itertools.cycle(LOOKS), strict=False):
        steps, name = [e["step"] for e in evaluations], Path(path).name
        perplexities = [e["perplexity"] for e in evaluations]
        start = {"marker": "o", "markevery": [0], "fillstyle": "none"} if steps[0] else {}
        left.plot(steps, perplexities, label=name, **look, **start)
        for layer, marker in zip(evaluations[-1]["layers"], "os^vDx", strict=False):
            right.plot(steps, [100 * e["layers"][layer]["top1_mu"] for e in evaluations],
                       marker=marker, markersize=4, label=f"{name}, layer {layer}", **look)
    shown = [e["step"] for evals in found.values() for e in evals if e["perplexity"] <= top]
    left.set(ylabel="MLM perplexity, held-out text", yscale="log", ylim=(0.95 * low, top))
    ticks = [digit * 10**n for n in range(6) for digit in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    ticks = [tick for tick in ticks if 0.95 * low <= tick <= top]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set(ylabel="top-1 memory usage (%)", ylim=(0, 102))
    margin = 0.02 * (max(shown) - min(shown))
    for axes in (left, right):
        axes.set(xlabel="training steps, those of the initial model included",
                 xlim=(min(shown) - margin, max(shown) + margin))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8, handlelength=5)
    save_figure(figure, out)


class Text:
    """Test text of a corpus, and what a model's memories read in it with nothing masked.
    ids: (sequences, time); reads[layer]: (slots, weights), (tokens, heads, topk) both."""

    @torch.no_grad()
    def __init__(self, args, model):
        time, dataset = trained_on(args.run)
        if not (args.data or dataset):
            raise UserError(f"{args.run}: its corpus is not known: --data NAME")
        corpus, reads = open_corpus(args.data or dataset, args.run), {}
        self.name, self.tokenizer = corpus.name, corpus.tokenizer()
        self.ids = cut(corpus, "test", time, args.sequences)
        device, _ = setup(args.device, "float32")
        model = model.to(device)
        with watch(model, lambda layer, *read: reads.setdefault(layer, []).append(
                [part.cpu() for part in read])):
            for batch in progress(torch.from_numpy(self.ids).split(8), f"data/{corpus.name}"):
                model.bert(batch.to(device))
        self.reads = {layer: [torch.cat(parts).numpy() for parts in zip(*read, strict=True)]
                      for layer, read in reads.items()}

    def contexts(self, layer, slot, most, width=8):
        """The `most` different contexts, `width` tokens to each side, of the tokens that read a
        slot most strongly: [(weight, summed over the heads; text with the token marked)]."""
        slots, weights = self.reads[layer]
        at = np.nonzero(slots == slot)
        weight, found = np.bincount(at[0], weights[at]), {}
        for token in np.argsort(-weight, kind="stable")[:np.count_nonzero(weight)]:
            row, place = divmod(token, self.ids.shape[1])
            parts = np.split(self.ids[row, max(0, place - width):place + width + 1],
                             [min(place, width), min(place, width) + 1])
            left, word, right = (self.tokenizer.decode(part, skip_special_tokens=False)
                                 for part in parts)
            found.setdefault(f"{left} «{word.strip()}» {right}".strip(), weight[token].item())
            if len(found) == most:
                break
        return [(weight, words) for words, weight in found.items()]


def slots(args):
    """The most read slots of a layer, or given ones, and the contexts that read them most."""
    model, _, checkpoint = load_run(args.run)
    tables = value_tables(model)
    if args.layer not in tables:
        raise UserError(f"{args.run}: no memory in layer {args.layer}, but in layers "
                        f"{', '.join(map(str, tables)) or '(none)'}")
    n_slots = len(tables[args.layer].weight)
    if bad := [slot for slot in args.slot if not 0 <= slot < n_slots]:
        raise UserError(f"slot {bad[0]}: layer {args.layer} has slots 0 to {n_slots - 1}")
    text = Text(args, model)
    reads, rows, found = text.reads[args.layer][0], [], []
    read, top1 = (np.bincount(s.ravel(), minlength=n_slots) for s in (reads, reads[..., 0]))
    for slot in args.slot or np.argsort(-read, kind="stable")[:args.most].tolist():
        counts = {"slot": slot, "reads": int(read[slot]), "top1": int(top1[slot])}
        contexts = text.contexts(args.layer, slot, args.contexts)
        found.append({**counts, "contexts": contexts})
        rows += [[*counts.values(), f"{weight:.2f}", words]
                 for weight, words in contexts or [(0, "(never read)")]]
    report(["slot", "reads", "top-1", "weight", "context"], rows,
           f"Layer {args.layer} of {checkpoint}; {len(reads):,} tokens of data/{text.name} x "
           f"{reads.shape[1]} heads; weights are summed over the heads.", found, args.out)


@torch.no_grad()
def fill(args):
    """The likeliest words for each [MASK], the slots read there, and what else reads those."""
    model, tokenizer, checkpoint = load_run(args.run)
    if not isinstance(model, MaskedLM):
        raise UserError(f"{checkpoint}: fine-tuned: it guesses no words any more")
    *_, first, last, mask = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(first + args.text.replace("[MASK]", mask) + last).ids
    masks = [i for i, token in enumerate(ids) if token == tokenizer.token_to_id(mask)]
    if not masks:
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    reads, text = {}, None
    with watch(model, lambda layer, *read: reads.update({layer: read})):
        logits = model(torch.tensor([ids]), torch.tensor([masks]))[0]
    try:
        text = Text(args, model) if reads else None
    except UserError as error:  # a run can be used without its corpus
        if args.data:
            raise
        print(f"what else reads the slots is not shown: {error}")
    print(f"{checkpoint}: {args.text}")
    for place, probabilities in zip(masks, logits.softmax(1), strict=True):
        best = probabilities.topk(5)
        print(f"[MASK] at token {place}:")
        for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {p:6.1%}  {tokenizer.id_to_token(token)}")
        for layer, (slots, weights) in reads.items():
            print(f"  layer {layer} read, slot (weight), best 3 of {slots.shape[2]} per head; what "
                  "else reads the best")
            for head, (slot, weight) in enumerate(zip(slots[place], weights[place], strict=True)):
                best3 = zip(slot[:3].tolist(), weight[:3].tolist(), strict=True)
                print(f"    head {head + 1}: " + "  ".join(f"{s} ({w:.2f})" for s, w in best3))
                for w, words in text.contexts(layer, slot[0].item(), args.contexts) if text else ():
                    print(f"      ({w:.2f}) {words}")


def main(argv=None):
    parser = Parser(description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(call, *parents):
        new = commands.add_parser(call.__name__, parents=parents, help=call.__doc__.split("\n")[0])
        new.set_defaults(call=call)
        return new.add_argument

    out, several, one = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    out.add_argument("--out", metavar="NAME", help="keep the results as NAME.md, NAME.json, ...",
                     type=lambda name: re.sub(r"\.(md|json|png|svg)$", "", name))
    several.add_argument("runs", nargs="+", metavar="RUN", help="out/<run>")
    one.add_argument("run", metavar="RUN", help="out/<run>, or one of its checkpoints")
    one.add_argument("--data", metavar="NAME", help="data/NAME instead of the run's own corpus")
    one.add_argument("--sequences", type=whole, default=512, metavar="N",
                     help="how many of its test split at most, evenly spread (512)")
    one.add_argument("--device", default="auto", help="cuda, mps, cpu")
    one.add_argument("--contexts", type=whole, default=3, metavar="N", help="for a slot (3)")

    add = command(table, several, out)
    add("--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it")
    add("--split", choices=("train", "dev"), default="train", help="of fine-tuned runs (train)")
    add("--usage_data", metavar="NAME", help="where usage is counted (the first of --data)")
    add("--repeats", type=whole, default=1, metavar="N", help="maskings (1)")
    add("--sequences", type=whole, metavar="N", help="a quick look at N, evenly spread (all)")
    add("--batch_size", type=whole, default=8, metavar="N", help="sequences (8)")
    add("--device", default="auto", help="cuda, mps, cpu")
    add("--dtype", default="auto", help="float32, bfloat16, float16")
    command(glue, several, out)
    add = command(by_class, several, out)
    add("--data", metavar="TASK", help="instead of the task that a run is fine-tuned on")
    add("--split", choices=("train", "dev"), default="train", help="(train)")
    add("--sequences", type=whole, metavar="N", help="a quick look at N, evenly spread (all)")
    add("--device", default="auto", help="cuda, mps, cpu")
    command(staleness, several, out)
    command(curves, several, out)
    add = command(slots, one, out)
    add("--layer", type=int, required=True, help="counted from 1")
    add("--slot", type=int, nargs="+", default=[], metavar="N", help="these slots")
    add("--most", type=whole, default=10, metavar="N", help="or the N most read (10)")
    command(fill, one)("text", help="a text with [MASK] in it")
    args = parser.parse_args(argv)
    args.call(args)


if __name__ == "__main__":
    run(main)
