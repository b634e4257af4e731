"""
Measure trained models: the memory tables and figures of Kim & Jung (2020).

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py table out/base_resm_init_sst2               # Table 6: fine-tuned runs
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py pays table.json                             # does a memory pay for its time?
$ python measure.py slots out/demo_resm_init --layer 2          # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py sample out/demo_causal_memory "Returns a new"   # a causal language model
$ python measure.py browse out/demo_resm_init --out memory      # memory.html: what a slot knows
$ python measure.py predict out/base_sst2 new.tsv --out said    # or new.txt, or "a sentence"

--out NAME writes NAME.md and NAME.json, and for a figure NAME.png and NAME.svg, too. For browse it
writes NAME.html, for predict NAME.tsv. python measure.py COMMAND --help lists a command's options.
"""
import itertools
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from lib import slots as reading
from lib import tasks, weights
from lib.corpus import causal_heldout, masked_heldout
from lib.device import set_up_device, to_device
from lib.files import markdown, read_json, read_table, to_json, tsv_text, write_text
from lib.ranks import deal_batches, first_rank, run_ranks, sum_over_ranks
from lib.run import Run, read_state
from lib.settings import Parser, Progress, UserError, at_least
from lib.squad import best_answers, make_windows, read_squad
from lib.tokenizer import special_tokens, text_tokenizer
from lib.training import evaluate_language_model
from lib.usage import count_reads, usage_metrics, watch_reads
from model import SpanReader, value_tables


def table(args):
    """Print Table 2 (perplexity and slot usage, with --data) or 6 (usage of fine-tuned runs)."""
    if args.data:
        table_2(args)
    else:
        table_6(args)


def table_2(args):
    """Evaluate language models on whole test splits, with the same batches for all."""
    causal = weights.read_weights(args.runs[0])["config"].causal
    for path in args.runs:
        check_language_model(path, causal)
    seq_len = min(reading.training_text(path)[0] for path in args.runs)
    heldout, tokens = {}, {}
    for name in args.data:
        corpus = weights.open_corpus(name, *args.runs, seen=args.seen)
        tokens[name] = len(corpus.split("test"))
        if causal:  # windows overlap by half: a token is predicted once, and its reads count twice
            heldout[name] = causal_heldout(corpus, "test", seq_len, 8, stride=seq_len // 2)
        else:
            heldout[name] = masked_heldout(corpus, "test", seq_len, 8)
    longest = max(tokens, key=tokens.get)
    records, systems = [], {}  # {settings: records of the runs that differ in their seed alone}
    for path in args.runs:
        checkpoint, _ = weights.find_weights(path)
        model = weights.load_model(checkpoint).to(args.device)
        results = {}
        for name, batches in heldout.items():
            batches = Progress(batches, f"{path}, data/{name}")
            results[name], _ = evaluate_language_model(model, batches, args.device)
        facts = how_trained(checkpoint)
        records.append({"checkpoint": str(checkpoint), "run": path, **facts, "results": results})
        system = *settings_but_seed(checkpoint), facts["steps"]
        systems.setdefault(system, []).append(records[-1])
    known = [set(settings) for settings, *_ in systems if settings]  # not of weights from elsewhere
    common = set.intersection(*known) if known else ()
    rows = []
    for (settings, *_), seeds in systems.items():
        own = [setting for setting in settings if setting not in common]
        rows.append(seeds_row(seeds, longest) | {"differs": " ".join(own)})
    note = (f"Test splits, sequences of {seq_len}. Usage on data/{longest}, the longest "
            f"({tokens[longest]:,} tokens; our reading). Steps: those of the initial model + the "
            "run's own, which took so many seconds; ?: not known, of weights from elsewhere. Only "
            "rows with the same number of steps show what the memory does. Runs that differ in "
            "their seed alone share a row: the seconds of the first, else means, perplexity with "
            "its 95% interval (Student). Differs: settings that are not the same in all rows.")
    write_table(args.out, rows, note, {"note": note, "runs": records})


def settings_but_seed(checkpoint):
    """Return what tells a run from another but the seed: its settings, and its initial model's."""
    settings = weights.run_settings(checkpoint)
    if not settings:
        return (), checkpoint
    own = [f"{key}={value}" for key, value in settings.items() if key not in NO_SYSTEM]
    return tuple(own), settings_but_seed(Path(settings["init_checkpoint"]))


def seeds_row(records, longest):
    """Make a row of table_2 of the runs that differ in their seed alone."""
    first, *others = records
    row = {key: first[key] for key in ("run", "steps", "seed", "seconds")}
    if others:
        row["run"] += f" and {len(others)} more"
        row["seed"] = " ".join(str(record["seed"]) for record in records)
    for name in first["results"]:
        perplexities = [record["results"][name]["perplexity"] for record in records]
        mean, reach = tasks.student_interval(perplexities)
        row[f"{name} ppl"] = f"{mean:.2f} ± {reach:.2f}" if others else mean
    usage = [record["results"][longest]["layers"] for record in records]
    means = {layer: {metric: np.mean([layers[layer][metric] for layers in usage])
                     for metric in metrics} for layer, metrics in usage[0].items()}
    return row | usage_cells(means)


# in config.json, and no part of a system
NO_SYSTEM = ("layout", "out", "seed", "init_from", "init_checkpoint", "init_sha256", "trained_on",
             "device", "threads", "torch", "commit", "ranks")
CELLS = {  # columns of a table; names are those of usage_metrics
    "MU": "{mu:.1%}",
    "uniform MU": "{mu_uniform:.1%}",
    "top-1 MU": "{top1_mu:.1%}",
    "uniform top-1": "{top1_mu_uniform:.1%}",
    "KL_u": "{kl_u:.2f}",
    "KL_w": "{kl_w:.2f}",
    "effective k": "{effective_k:.1f}",
    "accesses": "{accesses:,.0f}",
}


def usage_cells(layers):
    """Make the columns CELLS of a table from {layer: usage_metrics}."""
    cells = {"layers": "/".join(map(str, layers)) or "-"}
    for column, form in CELLS.items():
        cells[column] = "/".join(form.format(**metrics) for metrics in layers.values()) or "-"
    return cells


def how_trained(checkpoint):
    """Return how a checkpoint was trained: {"steps": "1,000 + 3,000", "seed": 1, "seconds": 95}.

    The steps are those of its initial models and its own. "?" stands for Hugging Face's weights.
    """
    if not (checkpoint / "state.pt").is_file():
        return dict.fromkeys(("steps", "own_steps", "seed", "seconds"), "?")
    settings, state = Run(checkpoint.parent).settings(), read_state(checkpoint)
    first = settings["first_step"]
    steps = [f"{step:,}" for step in (first, state["step"]) if step]
    public = any(text["train"] is None for text in weights.trained_on(checkpoint))
    if public or settings["init_checkpoint"] and not first:
        steps.insert(0, "?")
    return {"steps": " + ".join(steps), "own_steps": state["step"], "seed": settings["seed"],
            "seconds": round(state["elapsed"] + state["seconds"])}


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = weights.read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    weights.check_objective(path, saved["config"], causal)
    if "transform.weight" not in saved["weights"]:
        raise UserError(f"{path}: no masked-LM head: train one first: python pretrain.py "
                        f"configs/own_bert_resm.py --init_from={path}")


def table_6(args):
    """Count what each fine-tuned model reads in texts of its task: dev, then train."""
    rows, records = [], []
    for path, split in itertools.product(args.runs, ("dev", "train")):
        facts, examples = task_examples(path, split)
        counts = count_task_reads(path, examples, args.device)
        layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
        facts = {"run": path, **facts}
        rows.append(facts | usage_cells(layers))
        records.append(facts | {"layers": layers})
    note = ("Best epoch so far, dev (MNLI: matched) and train: the paper names no split. Padding "
            "does not count as an access.")
    write_table(args.out, rows, note, records)


def find_tuned(path):
    """Find a fine-tuned run's weights. Returns (folder, path of vocab.txt, settings)."""
    folder, vocab = weights.find_weights(path)
    settings = weights.run_settings(folder)
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run: python finetune.py makes one (others: "
                        "measure.py table RUN --data NAME)")
    return folder, vocab, settings


def task_examples(path, split):
    """Load a split of a fine-tuned run's task, "train" or "dev" (MNLI: matched).

    Returns {"weights": their folder, "task", "split", "examples": their number} and the Examples,
    or SQuAD's Windows.
    """
    folder, vocab, settings = find_tuned(path)
    task = tasks.find_task(settings["task"])
    if split == "dev":
        split = task.dev[""]
    examples = tasks.load_examples(task, split, text_tokenizer(vocab), settings["max_len"],
                                   settings["doc_stride"])
    facts = {"weights": str(folder), "task": task.name, "split": split, "examples": len(examples)}
    return facts, examples


@torch.no_grad()
def count_task_reads(path, examples, device):
    """Count what the model at `path` reads in Examples or Windows (see count_reads)."""
    model = weights.load_model(path).to(device).eval()
    with count_reads(value_tables(model), sum_over_ranks) as counts:
        for index in deal_batches(Progress(tasks.batches_by_length(examples, 32), path)):
            batch = tasks.pad([examples[n] for n in index])
            model.bert(**to_device(batch, device))
    return counts


AVERAGED = ["mnli", "qqp", "qnli", "sst2", "cola"]
TWO_SCORES = {  # the metrics in a cell; other tasks have the one that picks the epoch
    "squad": ("exact_match", "f1"),
    "mnli": ("accuracy", "accuracy_mm"),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
}


def glue(args):
    """Print Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    systems = {}  # {(initial model, memory update): {task: score_record}}
    records, hashes = [], {}  # hashes of the initial models
    for path in args.runs:
        if not Run(path).results():
            print(f"{path} is not done: left out")
            continue
        record, sha256 = score_record(path)
        initial, task = record["initial"], record["task"]
        if hashes.setdefault(initial, sha256) != sha256:
            raise UserError(f"{path} started from other weights of {initial} than a run before it: "
                            "the model was trained anew; fine-tune all runs from one")
        done = systems.setdefault((initial, record["update"]), {})
        if task in done:
            raise UserError(f"{path}: a second run of {task} from {initial}: name only one")
        done[task] = record
        records.append(record)
    if not systems:
        raise UserError(f"{', '.join(args.runs)}: no fine-tuned run that is done")
    rows = list(map(score_row, systems.values()))
    note = ("Dev splits, median over the seeds of each seed's best epoch; (n): of n seeds, without "
            "those whose score is nan. squad: exact match/F1; mnli: matched/mismatched; cola: "
            "Matthews' correlation. Avg: of the six numbers from mnli to cola, once all are there.")
    write_table(args.out, rows, note, records)


def score_record(path):
    """Read the scores of a fine-tuned run. Returns a record, and the SHA-256 of where it started.

    "scores" are the medians in percent; "seeds" has the scores of each seed in them.
    """
    run = Run(path)
    begun = [seed.settings() for seed in (*run.seed_runs(), run) if seed.settings()]
    settings, results = begun[0], run.results()
    task = tasks.task_name(settings["task"])
    percent = 1 if task == "squad" else 100

    def pick(scores):
        metrics = TWO_SCORES.get(task, [results["metric"]])
        return [percent * scores[f"eval_{metric}"] for metric in metrics]

    seeds = results.get("seeds", {"": results})  # the folder of one seed has no others
    record = {"run": path, "initial": str(Path(settings["init_from"])),
              "update": settings["update_memory"], "task": task, "scores": pick(results),
              "seeds": {seed: pick(seeds[seed]) for seed in weights.seed_scores(seeds)}}
    return record, settings["init_sha256"]


def score_row(done):
    """Make a row of Table 4, a dict by column. done: {task: score_record} of one system."""
    [record, *_] = done.values()
    row = {"initial model": record["initial"], "memory update": "Y" if record["update"] else "N"}
    for task in sorted(done, key=[*tasks.TASKS, *done].index):
        scores = "/".join(f"{score:.1f}" for score in done[task]["scores"])
        row[task] = f"{scores} ({len(done[task]['seeds'])})"
    if done.keys() >= set(AVERAGED):
        scores = [score for task in AVERAGED for score in done[task]["scores"]]
        row["Avg"] = f"{np.mean(scores):.1f}"
    return row


def by_class(args):
    """Draw Figure 4: how far apart two classes' slots are, before and after fine-tuning."""
    records = []
    for path in args.runs:
        checkpoint, _, settings = find_tuned(path)
        labels = weights.read_weights(checkpoint).get("labels")
        if not labels:
            raise UserError(f"{path}: by_class compares classes, this model knows none")
        start, _ = weights.find_weights(settings["init_checkpoint"])
        if weights.model_hash(start) != settings["init_sha256"]:
            raise UserError(f"{path} started from other weights than {start} has now: the model "
                            "was trained anew; fine-tune it again, with another --out")
        classes = largest_classes(task_examples(path, "train")[1])
        low, high = (labels[examples[0].label] for examples in classes)
        facts = {"run": path, "split": "train", "classes": f"{high} against {low}"}
        for when, folder in (("before", start), ("after", checkpoint)):
            counts = [count_task_reads(folder, examples, args.device) for examples in classes]
            for layer in counts[0]:
                negative, positive = (reads[layer]["top1"] for reads in counts)
                records.append({**facts, "when": when, "layer": layer,
                                **class_distances(positive, negative),
                                "accesses": int(positive.sum() + negative.sum())})
    note = ("KL (nats) and IOU of the slots that are top-1 for two classes. KL is over the slots "
            "that both classes read, which have the share `shared` of their reads. Accesses: of "
            "both classes.")
    write_table(args.out, records, note, records, draw_class_distances)


def largest_classes(examples):
    """List the Examples of the two largest classes. The class of the lower number comes first."""
    counts = Counter(example.label for example in examples)
    labels = sorted(label for label, _ in counts.most_common(2))
    return [[example for example in examples if example.label == label] for label in labels]


def class_distances(positive, negative):
    """Compute KL(t+ || t-), in nats, and IOU of two classes' top-1 slots (Figure 4).

    positive, negative: top-1 counts (n_slots,) of all examples of a class. The KL would be infinite
    if only positive examples read a slot. It is taken over the slots that both classes read, whose
    shares are normalised again (our reading). "shared" is the share of the reads there, the mean
    of both classes.
    """
    p, q = positive / positive.sum(), negative / negative.sum()
    iou = np.minimum(p, q).sum() / np.maximum(p, q).sum()
    both = (p > 0) & (q > 0)
    p, q = p[both], q[both]
    shared = (p.sum() + q.sum()) / 2
    p, q = p / p.sum(), q / q.sum()
    return {"kl": (p * np.log(p / q)).sum(), "shared": shared, "iou": iou}


def draw_class_distances(records):
    """Draw Figure 4 from by_class's records: two bars for each run, layer and moment."""
    figure, [panels] = subplots(1, 2, 0.4 * len(records) + 0.7, sharey=True)
    labels = [f"{Path(record['run']).name}\nlayer {record['layer']}, {record['when']}"
              for record in records]
    for axes, key, title in zip(panels, ("kl", "iou"), ("KL (nats)", "IOU")):
        bars = axes.barh(labels, [record[key] for record in records])
        axes.bar_label(bars, fmt="%.2f")
        axes.set(title=title, xmargin=0.3)  # room for the labels
    panels[0].invert_yaxis()
    return figure


def staleness(args):
    """Draw Figure 2: how many slots were last top-1 at which usage snapshot of a run."""
    rows, records = [], []
    for path in args.runs:
        run = Run(path)
        snapshots = run.usage_snapshots()
        for layer in run.settings()["memory_layers"]:
            last = 0  # number of each slot's last snapshot, 0 for none
            for number, counts in enumerate(snapshots.values(), 1):
                top1 = counts[f"layer{layer}_top1"]
                last = np.where(top1, number, last)
            shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
            shares = dict(zip(["never", *snapshots], shares.tolist(), strict=True))
            facts = {"run": path, "layer": layer, "accesses": int(top1.sum())}
            records.append({**facts, "slots": shares})
            rows.append(facts | {step: f"{share:.1%}" for step, share in shares.items()})
    note = ("Share of the slots by the step of the last snapshot at which they were top-1. A "
            "snapshot counts accesses in the run's held-out sequences.")
    write_table(args.out, rows, note, records, draw_staleness)


def draw_staleness(records):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot and for "never".

    records: {"run", "layer", "slots": {step of a snapshot or "never": share of the slots}}.
    """
    figure, panels = subplots(len(records), 1, 1.7 * len(records) + 0.5, sharey=True)
    for axes, record in zip(panels.flat, records, strict=True):
        shares = [100 * share for share in record["slots"].values()]
        bars = axes.bar(list(map(str, record["slots"])), shares)
        axes.bar_label(bars, fmt="%.1f")
        axes.set(ylim=(0, 115), title=f"{Path(record['run']).name}, layer {record['layer']}")
    figure.supxlabel("step of the last snapshot in which a slot was top-1")
    figure.supylabel("slots (%)")
    return figure


def curves(args):
    """Draw Figure 3: perplexity and top-1 usage against the step, for several runs."""
    runs, rows = {}, []
    for path in args.runs:
        runs[path] = Run(path).evaluations()
        if not runs[path]:
            raise UserError(f"{path}: no evaluation of a language model in its log")
        last = runs[path][-1]
        rows.append({"run": path, "steps": last["step"], "ppl": last["perplexity"],
                     **usage_cells(last["layers"])})
    note = "Held-out text of each run's corpus. The steps of the initial model count."
    write_table(args.out, rows, note, runs, draw_curves)


def draw_curves(runs):
    """Draw Figure 3: perplexity above top-1 usage, against the step.

    Perplexities above twice the last ones are cut off. runs: {path: a list of evaluations}.
    """
    figure, panels = subplots(2, 1, 8, sharex=True)
    [upper], [lower] = panels
    for number, (path, log) in enumerate(runs.items()):
        name, color = Path(path).name, f"C{number}"
        steps = [evaluation["step"] for evaluation in log]
        perplexity = [evaluation["perplexity"] for evaluation in log]
        upper.plot(steps, perplexity, color=color, label=name)
        for layer, line in zip(log[-1]["layers"], itertools.cycle(("-", "--", "-.", ":"))):
            usage = [100 * evaluation["layers"][layer]["top1_mu"] for evaluation in log]
            lower.plot(steps, usage, line, color=color, label=f"{name}, layer {layer}")
    last = [log[-1]["perplexity"] for log in runs.values()]
    limits = 0.9 * np.nanmin(last), 2 * np.nanmax(last)  # nan: diverged
    upper.set(yscale="log", ylim=limits, title="perplexity on held-out text (log scale)")
    upper.yaxis.set_minor_formatter("{x:g}")
    lower.set(ylim=(0, 102), title="top-1 memory usage (% of slots)",
              xlabel="training steps, with those of the initial model")
    upper.legend()
    lower.legend()
    return figure


def pays(args):
    """Draw r(N): how many times N steps reach, without memory, what N steps reach with one.

    args.table has runs of several lengths on one text: what `table --out` wrote. A memory pays
    where its step takes less than r(N) times as long as one without.
    """
    systems = {}  # {seed: perplexities {steps: ...} without a memory, and with one}
    for run in read_json(args.table)["runs"]:
        result, *others = run["results"].values()
        lengths = systems.setdefault(run["seed"], ({}, {}))[bool(result["layers"])]
        if others or run["own_steps"] in lengths:
            raise UserError(f"{run['run']}: give one text, and one run for each seed and length")
        lengths[run["own_steps"]] = result["perplexity"]
    found = {}  # {N: ln r(N) of each seed}
    for seed, (control, memory) in systems.items():
        falling = [perplexity for _, perplexity in sorted(control.items())]
        if len(falling) < 2 or falling != sorted(falling, reverse=True):
            raise UserError(f"seed {seed}: expected two lengths without memory or more, and the "
                            f"longer the lower, not {falling}")
        for n, perplexity in memory.items():
            found.setdefault(n, []).append(np.log(steps_to_reach(perplexity, control) / n))
    rows = []
    for n, ratios in sorted(found.items()):
        mean, reach = tasks.student_interval(ratios)
        low, middle, high = np.exp([mean - reach, mean, mean + reach])
        interval = f"{low:.2f} to {high:.2f}" if len(ratios) > 1 else "-"
        rows.append({"N": f"{n:,}", "r(N)": f"{middle:.2f}", "95% interval": interval,
                     "seeds": len(ratios)})
    note = ("r(N) is read between neighbouring lengths of the control, or along its first or last "
            "two, on logarithmic axes. Means of its logarithm over seeds (Student).")
    write_table(args.out, rows, note, {"ln r(N)": found}, lambda _: draw_pays(systems))


def steps_to_reach(perplexity, control):
    """Return how many steps lead to a perplexity. control: {steps: perplexity}, falling."""
    steps, reached = np.log(sorted(control.items())).T
    after = np.searchsorted(-reached, -np.log(perplexity)).clip(1, len(steps) - 1)
    fall = (np.log(perplexity) - reached[after - 1]) / (reached[after] - reached[after - 1])
    return np.exp(steps[after - 1] + fall * (steps[after] - steps[after - 1]))


def draw_pays(systems):
    """Draw perplexity against steps for each seed, and r(N) as the distance of the curves."""
    figure, [[panel]] = subplots(1, 1, 4)
    for number, (control, memory) in enumerate(systems.values()):
        for name, color, runs in ("without memory", "C0", control), ("with memory", "C1", memory):
            panel.plot(*zip(*sorted(runs.items())), "o-", color=color, markersize=3,
                       label=None if number else name)
        for n, perplexity in memory.items():
            panel.plot([n, steps_to_reach(perplexity, control)], [perplexity] * 2, ":k",
                       linewidth=1)
    panel.set(xscale="log", yscale="log", xlabel="training steps", ylabel="perplexity",
              title="Dotted: from N to r(N) x N steps")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.legend()
    return figure


def subplots(rows, columns, height, **settings):
    """Make a figure of (rows, columns) panels, 5.5 inches wide and `height` inches high."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook may have set another
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(5.5, height), squeeze=False,
                           layout="constrained", **settings)


def write_table(out, rows, note, data, draw=None):
    """Print a table and a note; with `out`, write them to <out>.md, `data` to <out>.json.

    rows: dicts {column: cell}. The figure draw(data) goes to <out>.png and <out>.svg.
    """
    columns = dict.fromkeys(itertools.chain(*rows))
    text = f"{markdown(columns, [map(row.get, columns) for row in rows])}\n{note}\n"
    print(text, end="")
    if not out or not first_rank():
        return
    if not (Path(f"{out}.md").exists() and Path(f"{out}.json").exists()):  # an earlier table
        for ending in (".md", ".json", ".png", ".svg"):
            new_file(out, ending)
    write_text(f"{out}.md", text)
    write_text(f"{out}.json", to_json(data, indent=1) + "\n")
    if draw:
        figure = draw(data)
        figure.savefig(f"{out}.png", dpi=150)
        figure.savefig(f"{out}.svg")


def new_file(name, ending):
    """Return the path of a file that is not there yet. `name` may have the ending."""
    path = Path(name.removesuffix(ending) + ending)
    if path.exists():
        raise UserError(f"{path} exists already: remove it, or give another --out")
    return path


def slots(args):
    """Show the ten most read slots of a layer, with contexts."""
    model, _, corpus = reading.open_model(args)
    layers = value_tables(model)
    if args.layer not in layers:
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{list(layers)}")
    reads = corpus.reads[args.layer]
    rows, records = [], []
    for slot in reads.top_slots(10):
        facts = {"slot": slot, "reads": int(reads.counts["read"][slot]),
                 "top1": int(reads.counts["top1"][slot])}
        contexts = [found[:2] for found in corpus.contexts(args.layer, slot, args.contexts)]
        records.append({**facts, "contexts": contexts})
        rows += [{**facts, "weight": weight, "context": text} for weight, text in contexts]
    note = f"{corpus.ids.size:,} tokens of data/{corpus.name}; weights are summed over the heads."
    write_table(args.out, rows, note, records)


@torch.no_grad()
def fill(args):
    """Guess each [MASK]; show the slots read there, and what else reads those."""
    check_language_model(args.run, causal=False)
    model, tokenizer, corpus = reading.open_model(args)
    special = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(args.text.replace("[MASK]", special.mask)).ids
    positions = np.flatnonzero(np.equal(ids, tokenizer.token_to_id(special.mask)))
    if not len(positions):
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    if len(ids) > model.bert.config.max_len:
        raise UserError(f"the text has more tokens than {args.run} has positions: shorten it")
    if len(ids) > reading.training_text(args.run)[0]:
        print("the model was trained on shorter sequences: positions beyond are untrained")
    found, batch = {}, torch.tensor([ids], device=model.bias.device)
    with watch_reads(value_tables(model), lambda layer, *read: found.update({layer: read})):
        chances = model(batch)[0].softmax(1)
    for position in positions:
        print(f"[MASK] at token {position}:")
        for probability, token in zip(*(part.tolist() for part in chances[position].topk(5))):
            print(f"  {probability:6.1%}  {tokenizer.id_to_token(token)}")
        for layer, (read, shares) in found.items():
            for head, (slot, *_) in enumerate(read[position].tolist()):
                share = shares[position, head, 0]
                print(f"  layer {layer}, head {head + 1}: slot {slot} ({share:.2f}); its contexts:")
                for weight, text, _ in corpus.contexts(layer, slot, args.contexts):
                    print(f"    ({weight:.2f}) {text}")


def sample(args):
    """Continue a text with a causal language model."""
    check_language_model(args.run, causal=True)
    model, tokenizer = reading.load_with_tokenizer(args.run)
    start = special_tokens(tokenizer.get_vocab()).sep  # a document begins
    ids = tokenizer.encode(start + args.text, add_special_tokens=False).ids
    window, _ = reading.training_text(args.run)
    generator = torch.Generator().manual_seed(args.seed)
    ids = reading.continue_text(model.to(args.device), ids, args.tokens, window, args.temperature,
                                generator)
    print(tokenizer.decode(ids[1:], skip_special_tokens=False))


def browse(args):
    """Write an HTML page of what slots know: usage, contexts, a search for tokens."""
    path = new_file(args.out or "memory", ".html")
    _, _, corpus = reading.open_model(args)
    if not corpus:
        raise UserError(f"{args.run}: a model without memory has no slots")
    note = f"What {corpus.ids.size:,} tokens of data/{corpus.name} read, nothing masked"
    data = reading.page_data(corpus, args.contexts)
    write_text(path, reading.page_html({"title": args.run, "note": note, **data}))
    print(f"wrote {path}: open it in a browser")


def predict(args):
    """Predict for new texts with a fine-tuned model's median seed; print or write a TSV table.

    It has the columns of the file, or ids and questions. Then come the prediction, and a class's
    probability or an answer's score; they replace columns of the file that have these names.
    """
    file = Path("/dev/stdin" if args.file == "-" else args.file)
    out = args.out and new_file(args.out, ".tsv")
    folder, vocab, settings = find_tuned(args.run)
    print(f"weights of {folder}", file=sys.stderr)  # a run's median seed, for example
    device, _ = set_up_device(args.device, "float32", sys.stderr)
    model = weights.load_model(folder).to(device)
    tokenizer, max_len = text_tokenizer(vocab), settings["max_len"]
    if isinstance(model, SpanReader):
        windows = make_windows(tokenizer, read_squad(file), max_len, settings["doc_stride"])
        answers = best_answers(windows, tasks.predict_examples(model, windows))
        rows = [{"id": question.id, "question": question.text, "prediction": text,
                 "score": f"{score:.3f}"} for question, (text, score) in answers.items()]
    else:
        columns = settings["texts"]
        # a sentence, or two with a tab between
        if " " in args.file and file.suffix not in (".tsv", ".txt", ".json"):
            given = [dict(zip(columns, args.file.split("\t", len(columns) - 1)))]
        else:  # lines of a .txt file and of stdin need no header
            given = read_table(file, columns if file.suffix in ("", ".txt") else ())
        texts = tasks.pick_texts(file, given, columns)
        examples = tasks.encode_examples(tokenizer, texts, [None] * len(texts), max_len)
        cells = tasks.prediction_cells(tasks.predict_examples(model, examples),
                                       weights.read_weights(folder)["labels"])
        rows = [row | new for row, new in zip(given, cells)]
    if out:
        write_text(out, tsv_text(rows))
    else:
        print(tsv_text(rows), end="")


COMMANDS = {  # the arguments of each, in the order of the docstring above
    table: "runs --data... --out --device --seen",
    glue: "runs --out",
    by_class: "runs --out --device",
    staleness: "runs --out",
    curves: "runs --out",
    pays: "table --out",
    slots: "run --layer --contexts --data --out --device --seen",
    fill: "run text --contexts --data --device --seen",
    sample: "run text --tokens --temperature --seed --device",
    browse: "run --contexts --data --out --device --seen",
    predict: "run file --out --device",
}
ARGUMENTS = {
    "runs": {"nargs": "+", "metavar": "out/RUN"},
    "run": {"help": "out/RUN, or one of its checkpoints or seeds"},
    "table": {"help": "TABLE.json, which `table --out TABLE` wrote"},
    "text": {"help": "in quotes; fill guesses each [MASK], sample goes on with it"},
    "file": {"help": "a sentence, .txt (lines), .tsv (with a header), SQuAD's JSON, or - (stdin)"},
    "--data...": {"nargs": "+", "metavar": "NAME", "help": "data/NAME: perplexity on it (Table 2)"},
    "--data": {"metavar": "NAME", "help": "data/NAME, not the run's corpus"},
    "--out": {"metavar": "NAME", "help": "write files of this name"},
    "--device": {"default": "auto", "help": "auto, cuda, mps or cpu"},
    "--seen": {"action": "store_true",
               "help": "read documents that a run was trained on in another split, too"},
    "--layer": {"type": at_least(1), "required": True, "help": "counted from 1"},
    "--contexts": {"type": at_least(1), "default": 5, "help": "of a slot (5)"},
    "--tokens": {"type": at_least(1), "default": 40, "help": "to add (40)"},
    "--temperature": {"type": at_least(0, float), "default": 0.8,
                      "help": "0: the likeliest token (0.8)"},
    "--seed": {"type": at_least(0), "default": 0, "help": "of the draws (0)"},
}


def main(argv=None):
    parser = Parser(description=__doc__)
    sections = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, names in COMMANDS.items():
        section = sections.add_parser(command.__name__, help=command.__doc__)
        section.set_defaults(call=command)
        for name in names.split():
            section.add_argument(name.removesuffix("..."), **ARGUMENTS[name])
    args = parser.parse_args(argv)
    if "device" in args and args.call is not predict:  # its table is alone on stdout
        args.device, _ = set_up_device(args.device, "float32")
    args.call(args)


if __name__ == "__main__":
    run_ranks(main)
