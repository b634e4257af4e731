"""
Look inside trained models: the memory tables and figures of Kim & Jung (2020), from run folders.

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py slots out/demo_resm_init --layer 2           # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py sample out/demo_causal_memory "Returns a new"   # of a causal language model
$ python measure.py browse out/demo_resm_init --out memory      # memory.html: what a slot knows
$ python measure.py predict out/base_sst2 new.tsv --out said     # a fine-tuned run on new text
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py table out/base_resm_init_sst2               # Table 6
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4

--out NAME writes the table to NAME.md, its numbers to NAME.json, a figure to NAME.png and NAME.svg;
browse writes NAME.html, predict NAME.tsv.
In this file: what computes, then the commands, which print.
"""
import contextlib
import itertools
import json
import re
from pathlib import Path

import numpy as np
import torch

from lib.common.device import choose_device
from lib.common.errors import UserError
from lib.common.files import atomic, load_file, read_json, write_text
from lib.common.progress import Progress, markdown
from lib.common.settings import Parser, whole_number
from lib.corpus.batches import Corpus, causal_heldout, masked_heldout
from lib.corpus.vocabulary import load_tokenizer, special_tokens
from lib.distributed.processes import deal_batches, first_rank_first, is_distributed, run_ranks
from lib.slot_usage.browse import collect, page
from lib.slot_usage.contexts import open_corpus, read_corpus, trained_on
from lib.slot_usage.counts import (
    class_distances,
    count_reads,
    evaluate_language_model,
    last_used,
    usage_metrics,
    watch_reads,
)
from lib.slot_usage.figures import draw_bars, draw_curves
from lib.tasks.examples import batches_by_length
from lib.tasks.glue import find_task, task_name, tsv_text
from lib.tasks.predict import predict_file
from lib.tasks.task_data import load_examples
from lib.training.run import NO_EFFECT, read_evaluations, read_settings, read_usage
from lib.training.trainer import to_device
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights
from model import MaskedLM, value_tables


def trained_for(path):
    """The steps of the weights at `path` and the seed of their run, as {"steps": "4,000 + 3,000",
    "seed": 1}: those of the initial model + its own, of a run that is not done as "100 of 3,000";
    "?" where they are not known, as of weights in Hugging Face layout."""
    checkpoint, _ = find_weights(path)
    if not (checkpoint / "state.pt").is_file():
        return {"steps": "?", "seed": "?"}
    settings = read_settings(checkpoint.parent, ["max_steps", "seed"])
    step, last = load_file(checkpoint / "state.pt")["step"], settings["max_steps"]
    steps = f"{step:,} of {last:,}" if step < last else f"{step:,}"
    if settings["init_checkpoint"]:
        before = settings["first_step"]  # 0 of an initial model in Hugging Face layout
        steps = f"{before:,} + {steps}" if before else f"? + {steps}"
    return {"steps": steps, "seed": settings["seed"]}


def seed_folders(path):
    """The folders of a fine-tuned run's seeds, or `path` itself if it is one; [] of another run."""
    folders, seeds = [], Path(path).glob("seed*")
    for folder in (Path(path), *sorted(seeds, key=lambda seed: (len(seed.name), seed.name))):
        with contextlib.suppress(UserError):
            if "task" in read_settings(folder):
                folders.append(folder)
    return folders


class TaskSample:
    """Examples of a split of a task, by default of the one that the run `path` was fine-tuned on:
    at most args.sequences, evenly spread. checkpoint: of a fine-tuned run the best one of its first
    seed; settings: its settings, else {}."""

    def __init__(self, args, path):
        seeds = seed_folders(path)
        if not (args.data or seeds):
            raise UserError(f"{path}: not a fine-tuned run: it takes --data TASK")
        self.settings = read_settings(seeds[0]) if seeds else {}
        self.checkpoint, vocab = find_weights(path)
        print(f"{path}: weights of {self.checkpoint}")
        self.tokenizer = load_tokenizer(vocab)
        with first_rank_first():
            self.task = find_task(args.data or self.settings["task"])
        split = "train" if args.split == "train" else next(iter(self.task.dev.values()))
        lengths = [self.settings.get(key, 128) for key in ("max_len", "doc_stride")]
        self.examples = load_examples(self.task, split, self.tokenizer, *lengths)
        total = len(self.examples.ids)
        self.chosen = np.linspace(0, total - 1, min(args.sequences or total, total)).astype(int)
        self.device, _, line = choose_device(args.device, "float32")
        print(line)

    def halves(self):
        """Of each of two classes two random halves, all with the same number of examples."""
        rng, labels = np.random.default_rng(0), self.examples.labels[self.chosen]
        size = min(np.bincount(labels, minlength=2)) // 2
        if not size:
            raise UserError(f"{self.task.folder}: a class has fewer than two of the "
                            f"{len(self.chosen):,} examples: too few to compare classes")
        return [rng.permutation(self.chosen[labels == label])[:2 * size].reshape(2, size)
                for label in (0, 1)]

    @torch.no_grad()
    def count(self, weights, what, chosen=None):
        """The counts of count_reads over the examples, or over these of them."""
        model = load_model(weights).to(self.device).eval()
        chosen = self.chosen if chosen is None else chosen
        batches = batches_by_length(self.examples.lengths[chosen], 32)
        with count_reads(model) as counts:
            for batch in deal_batches(Progress(batches, what)):
                model.bert(**to_device(self.examples.pad(chosen[batch]), self.device))
        return counts


def report(args, header, rows, note, data, draw=None):
    """Print a table in Markdown, its header written "a | b", and a note on it. With --out, write
    them to <out>.md, `data` to <out>.json, and the figure draw() to <out>.png and <out>.svg."""
    text = f"{markdown(header.split(' | '), rows)}\n{note}\n"
    print(text, end="")
    if not args.out:
        return
    write_text(f"{args.out}.md", text)
    write_text(f"{args.out}.json", json.dumps(data, indent=1) + "\n")
    if draw:
        figure = draw()
        for suffix in (".png", ".svg"):
            with atomic(args.out + suffix) as path:
                figure.savefig(path)
    print(f"wrote {args.out}.md, .json{', .png, .svg' if draw else ''}")


USAGE = "layers | MU % | uniform | top-1 MU % | uniform | KL_u | KL_w | effective k | accesses"
USAGE_CELLS = ["{layer}", "{mu:.1%}", "{mu_uniform:.1%}", "{top1_mu:.1%}", "{top1_mu_uniform:.1%}",
               "{kl_u:.2f}", "{kl_w:.2f}", "{effective_k:.1f}", "{accesses:,.0f}"]


def usage_cells(*usages):
    """The cells under USAGE: of every layer the mean over usages, each a dict {layer:
    usage_metrics}."""
    layers = [{"layer": n, **{key: np.mean([usage[n][key] for usage in usages]) for key in metrics}}
              for n, metrics in usages[0].items()]
    cells = []
    for cell in USAGE_CELLS:
        texts = [cell.format(**layer).rstrip("%") for layer in layers]
        if "uniform" in cell or "accesses" in cell:
            texts = texts[:1]  # the same in all layers
        cells.append("/".join(texts) or "-")
    return cells


def table(args):
    """Table 2: perplexity on each corpus, and the usage of each memory layer on one of them. Of
    fine-tuned runs Table 6: the usage on their own task. A causal model's perplexity is of the next
    token: each window starts half a window after the one before and predicts what that one did not,
    so every token is predicted once, from half a window or more (at the start of the split, where
    [SEP] stands before the text, from less). Its usage counts all the tokens of all windows."""
    if {bool(seed_folders(path)) for path in args.runs} != {not args.data}:
        raise UserError("table takes runs of pretraining with --data, or fine-tuned runs without")
    if not args.data:
        return table_of_tasks(args)
    usage_data = args.usage_data or args.data[0]
    corpora = list(dict.fromkeys([*args.data, usage_data]))
    causal = read_weights(args.runs[0])["config"].get("causal", False)
    if causal and args.repeats > 1:
        raise UserError(f"--repeats {args.repeats}: a causal model has no maskings to repeat")
    for path in args.runs:  # mistakes come before the long work
        saved = read_weights(path)
        if saved.get("head"):
            raise UserError(f"{path}: a fine-tuned checkpoint has no masked-LM head")
        check_objective(path, saved["config"], causal)
        for name in corpora:
            open_corpus(name, path)
    seq_len = min(trained_on(path)[0] for path in args.runs)
    sizes = seq_len, args.batch_size, args.sequences
    (device, dtype, line), runs, rows = choose_device(args.device, args.dtype), [], []
    print(line)
    for path in args.runs:
        checkpoint, _ = find_weights(path)
        print(f"{path}: weights of {checkpoint}")
        model = load_model(checkpoint).to(device)
        results = {name: [] for name in corpora}
        for name, masking in itertools.product(corpora, range(args.repeats)):
            batches = (causal_heldout(Corpus(name), "test", *sizes, stride=seq_len // 2) if causal
                       else masked_heldout(Corpus(name), "test", *sizes, masking))
            what = f"{path}, data/{name}" + f", masking {masking + 1}" * (args.repeats > 1)
            batches = Progress(batches, what)
            results[name].append(evaluate_language_model(model, batches, device, dtype)[0])
        del model  # before the next one is loaded
        trained = trained_for(checkpoint)
        runs.append({"run": path, "checkpoint": str(checkpoint), **trained, "results": results})
        row = [path, *trained.values()]
        for name in args.data:
            values = [result["perplexity"] for result in results[name]]
            spread = f" [{min(values):.2f}, {max(values):.2f}]" if args.repeats > 1 else ""
            row.append(f"{np.mean(values):.2f}{spread}")
        rows.append(row + usage_cells(*(result["layers"] for result in results[usage_data])))
    maskings = f"; mean [lowest, highest] of {args.repeats} maskings" if args.repeats > 1 else ""
    note = (f"Test splits, {args.sequences or 'all'} sequences of {seq_len}; usage on "
            f"data/{usage_data}{maskings}. Steps: those of the initial model + the run's own. Only "
            "rows of as many steps show what the memory does; each is one run of one seed, and "
            "another seed alone changes the perplexity: run several before you trust a small "
            "difference.")
    if causal:
        note += " Windows overlap by half; each token is predicted once."
    if unfinished := [run["run"] for run in runs if " of " in run["steps"]]:
        note += f" NOT FINISHED, so not to be compared yet: {', '.join(unfinished)}."
    header = ["run", "steps", "seed", *(f"{name} ppl" for name in args.data), USAGE]
    report(args, " | ".join(header), rows, note,
           {"note": note, "usage_data": usage_data, "runs": runs})


def table_of_tasks(args):
    """Table 6: usage of each run's best checkpoint on its task."""
    records = []
    for path in args.runs:
        sample = TaskSample(args, path)
        counts = sample.count(sample.checkpoint, path)
        records.append({"run": path, "checkpoint": str(sample.checkpoint),
                        "done": (sample.checkpoint.parent / "eval_results.json").is_file(),
                        "task": sample.settings["task"], "examples": len(sample.chosen),
                        "layers": {n: usage_metrics(**layer) for n, layer in counts.items()}})
    rows = [[r["run"], r["task"], f"{r['examples']:,}", *usage_cells(r["layers"])] for r in records]
    note = f"After fine-tuning, {args.split} split, nothing masked, padding not counted."
    if unfinished := [record["run"] for record in records if not record["done"]]:
        note += f" NOT FINISHED, best epoch so far: {', '.join(unfinished)}."
    report(args, f"run | task | examples | {USAGE}", rows, note, records)


SCORES = {  # task: title, metrics
    "squad": ("SQuAD 1.1 (EM/F1)", ["exact_match", "f1"]),
    "mnli": ("MNLI-(m/mm)", ["accuracy", "accuracy_mm"]), "qqp": ("QQP", ["accuracy"]),
    "qnli": ("QNLI", ["accuracy"]), "sst2": ("SST-2", ["accuracy"]),
    "cola": ("CoLA (Matt)", ["matthews_correlation"]),
    "mrpc": ("MRPC (Acc/F1)", ["accuracy", "f1"]),
    "stsb": ("STS-B (P/S)", ["pearson", "spearmanr"]), "rte": ("RTE", ["accuracy"])}
TABLE_4 = list(SCORES)[:6]  # its columns; it averages all but SQuAD's
# Not part of a recipe: settings that change no score, and the seeds, over which the median is taken
NO_RECIPE = NO_EFFECT | {"seed", "seeds"}


def read_scores(paths):
    """The scores of fine-tuned runs: {(initial model, update_memory, recipe): {task: {seed:
    scores}}}. A recipe is '' or, where runs of one initial model on one task differ in more than
    the seed, names these settings: 'lr=2e-05'. Seeds that are not done are left out."""
    cells, systems, seen = {}, {}, {}
    for path in paths:
        if not Path(path).is_dir():
            raise UserError(f"{path}: no such run")
        done = [folder for folder in seed_folders(path) if (folder / "eval_results.json").is_file()]
        if not done:
            print(f"{path} is left out: not fine-tuned, or not done")
        for folder in done:
            settings = read_settings(folder)
            cell = settings["init_from"], settings["update_memory"], task_name(settings["task"])
            cells.setdefault(cell, {})[folder.resolve()] = folder, settings
    for (*system, task), runs in cells.items():
        values = {}  # {key: its values, as text, in those that have it: older ones lack some}
        for _, settings in runs.values():
            for key in settings.keys() - NO_RECIPE:
                values.setdefault(key, set()).add(str(settings[key]))
        keys = sorted(key for key, found in values.items() if len(found) > 1)
        for folder, settings in runs.values():
            key = *system, ", ".join(f"{name}={settings.get(name)}" for name in keys)
            seeds, seed = systems.setdefault(key, {}).setdefault(task, {}), settings["seed"]
            if seed in seeds:
                raise UserError(f"{seen[key, task, seed]} and {folder} have the same settings and "
                                "the same seed: leave one of them out")
            seen[key, task, seed] = folder
            seeds[seed] = read_json(folder / "eval_results.json")
    if not systems:
        raise UserError(f"{', '.join(paths)}: no fine-tuned run that is done")
    return systems


def glue(args):
    """Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    systems, rows, records = read_scores(args.runs), [], []
    scored = {task for scores in systems.values() for task in scores}
    more = [task for task in (*SCORES, *sorted(scored - SCORES.keys()))
            if task in scored and task not in TABLE_4]
    columns = [*TABLE_4, "Avg", *more]
    for (initial, updated, recipe), scores in systems.items():
        medians = {}  # {task: the medians of its SCORES, in percent}
        for task, seeds in scores.items():
            _, metrics = SCORES.get(task, (task, ["accuracy", "pearson"]))
            scale = 1 if task == "squad" else 100  # SQuAD's are in percent already
            values = [[result.get(f"eval_{metric}") for result in seeds.values()]
                      for metric in metrics]
            medians[task] = [scale * float(np.median(v)) for v in values if None not in v]
        averaged = [value for task in TABLE_4[1:] for value in medians.get(task, [])]
        average = float(np.mean(averaged)) if len(averaged) == 6 else None  # MNLI has two
        records.append({"init_from": initial, "update_memory": updated, "recipe": recipe,
                        "median": medians, "average": average, "seeds": scores})
        shown = medians | ({} if average is None else {"Avg": [average]})
        cells = ["/".join(f"{value:.1f}" for value in shown.get(task, [])) for task in columns]
        seeds = [len(seeds) for seeds in scores.values()]
        seeds = "-".join(map(str, sorted({min(seeds), max(seeds)})))  # 3, or 1-3
        rows.append([f"{initial} {recipe}".strip(), "Y" if updated else "N", seeds,
                     *(cell or "-" for cell in cells)])
    titles = [SCORES.get(task, (task,))[0] for task in columns]
    report(args, " | ".join(["initial model", "memory update", "seeds", *titles]), rows,
           "Dev splits, median over the seeds of each seed's best epoch; -: not run. Avg: of the "
           "six columns from MNLI-m to CoLA, once all are there.", records)


def by_class(args):
    """Figure 4: how much the slots differ that a task's two classes read, before and after
    fine-tuning."""
    records = []
    for path in args.runs:
        sample = TaskSample(args, path)
        classes = len(sample.task.labels)
        if classes != 2:
            raise UserError(f"{sample.task.name} has {classes} classes, expected two")
        halves = sample.halves()
        models = {"before": sample.settings.get("init_checkpoint", sample.checkpoint)}
        if sample.settings:
            models["after"] = sample.checkpoint
        for when, weights in models.items():
            counts = [[sample.count(weights, f"{path}, {when}, class {label}, half {n}", half)
                       for n, half in enumerate(halves[label], 1)] for label in (1, 0)]
            for layer in counts[0][0]:
                top1 = np.array([[half[layer]["top1"] for half in halves] for halves in counts])
                records.append({"run": path, "when": when, "layer": layer,
                                **class_distances(*top1), "accesses": int(top1.sum()) // 4})
    if not records:
        raise UserError(f"{args.runs[0]}: a model without memory has no slots to compare")
    rows = [[r["run"], r["layer"], r["when"], *(f"{r[name + part]:.3f}" for name in ("kl", "iou")
                                                for part in ("_between", "_floor", "")),
             f"{r['accesses']:,}"] for r in records]
    bars = [(title, f"{r['run'].removeprefix('out/')}\nlayer {r['layer']}\n{r['when']}",
             r[key + "_between"], r[key + "_floor"])
            for title, key in (("KL (nats)", "kl"), ("IOU", "iou"))
            for r in sorted(records, key=lambda r: (r["run"], r["layer"], r["when"] == "after"))]
    report(args, "run | layer | when | KL | floor | corrected | IOU | floor | corrected | accesses",
           rows, f"Top-1 slots, {args.split} split: KL(class 1 || 0.9 class 0 + 0.1 class 1) in "
           "nats, at most 2.30, and IOU of the shares of the slots. Floor: the same between two "
           "random halves of one class. Corrected for it, so that a KL of 0 and an IOU of 1 mean "
           "no more difference than that. Accesses: of each half.", records,
           lambda: draw_bars(bars, 1, 1.7, "%.2f"))


def staleness(args):
    """Figure 2: how many slots were top-1 for the last time at which usage snapshot of a run."""
    records = []
    for path in args.runs:
        snapshots = read_usage(path)
        for layer in read_settings(path)["memory_layers"]:
            last = last_used(snapshots, layer)
            shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
            slots = dict(zip(["never", *snapshots], shares.tolist(), strict=True))
            accesses = int(snapshots[max(snapshots)][f"layer{layer}_top1"].sum())
            records.append({"run": path, "layer": layer, "accesses": accesses, "slots": slots})
    columns = ["never", *sorted({step for r in records for step in r["slots"]} - {"never"})]
    rows = []
    for r in records:
        cells = {step: f"{share:.1%}" for step, share in r["slots"].items()}
        rows.append([r["run"], r["layer"], f"{r['accesses']:,}", *map(cells.get, columns)])
    bars = [(f"{r['run']}, layer {r['layer']}", str(step), 100 * share)
            for r in records for step, share in r["slots"].items()]
    report(args, " | ".join(["run", "layer", "accesses", *map(str, columns)]), rows,
           "Share of the slots by the step of the last snapshot at which they were top-1. "
           "Accesses: in a snapshot.", records,
           lambda: draw_bars(bars, len({r["layer"] for r in records}), 0.45, "%.1f",
                             "step of the last snapshot at which a slot was top-1", "slots (%)"))


def curves(args):
    """Figure 3: perplexity against step, and beside it top-1 usage, for several runs."""
    first = read_settings(args.runs[0], ["dataset"])
    for path in args.runs:
        settings = read_settings(path, ["dataset"])
        if any(settings.get(key, "masked") != first.get(key, "masked")
               for key in ("tokenizer_hash", "dataset", "objective")):
            raise UserError(f"{path} has another vocabulary, corpus or objective than "
                            f"{args.runs[0]}: their perplexities cannot be compared")
    runs, rows = {path: read_evaluations(path) for path in args.runs}, []
    for path, evaluations in runs.items():
        start, end = evaluations[0], evaluations[-1]
        usage = "/".join(f"{100 * metrics['top1_mu']:.1f}" for metrics in end["layers"].values())
        rows.append([path, f"{end['step']:,}", start["perplexity"], end["perplexity"],
                     f"{end['accuracy']:.1%}", "/".join(end["layers"]) or "-", usage or "-"])
    report(args, "run | steps | first ppl | last ppl | accuracy | layers | top-1 MU %", rows,
           f"Held-out text of data/{first['dataset']}; the steps of the initial model count.",
           runs, lambda: draw_curves(runs))


def slots(args):
    """The most read slots of a layer, or given ones, and the contexts that read them most."""
    checkpoint, _ = find_weights(args.run)
    model = load_model(checkpoint).eval()
    tables = value_tables(model)
    if args.layer not in tables:
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{', '.join(map(str, tables)) or 'none'}")
    n_slots = len(tables[args.layer].weight)
    if bad := [slot for slot in args.slot if not 0 <= slot < n_slots]:
        raise UserError(f"slot {bad[0]}: layer {args.layer} has slots 0 to {n_slots - 1}")
    device, _, line = choose_device(args.device, "float32")
    print(line)
    corpus, _, reads, contexts = read_corpus(args, model.to(device))
    reads, _ = reads[args.layer]
    read, top1 = (np.bincount(s.ravel(), minlength=n_slots) for s in (reads, reads[..., 0]))
    records = [{"slot": slot, "reads": int(read[slot]), "top1": int(top1[slot]),
                "contexts": contexts(args.layer, slot)}
               for slot in args.slot or np.argsort(-read, kind="stable")[:args.most].tolist()]
    rows = [[r["slot"], r["reads"], r["top1"], *context] for r in records
            for context in r["contexts"] or [(0.0, "(never read)")]]
    report(args, "slot | reads | top-1 | weight | context", rows,
           f"Layer {args.layer} of {checkpoint}; {len(reads):,} tokens of data/{corpus.name} x "
           f"{reads.shape[1]} heads; weights are summed over the heads.", records)


def browse(args):
    """A page in one HTML file, to find what a slot knows: usage, contexts, a search for words."""
    checkpoint, _ = find_weights(args.run)
    model = load_model(checkpoint).eval()
    if not value_tables(model):
        raise UserError(f"{args.run}: a model without memory has no slots")
    device, _, line = choose_device(args.device, "float32")
    print(line)
    corpus, ids, reads, _ = read_corpus(args, model.to(device))
    snapshots = {}
    with contextlib.suppress(UserError):  # a run has them, a folder of weights does not
        snapshots = read_usage(args.run)
    n_slots = {n: len(table.weight) for n, table in value_tables(model).items()}
    found = collect(ids, corpus.tokenizer(), reads, n_slots, snapshots, args.contexts)
    note = (f"{checkpoint.name}: what {ids.size:,} tokens of data/{corpus.name}'s test text read, "
            "nothing masked")
    text, file = page({"title": args.run, "note": note, **found}), Path(f"{args.out}.html")
    write_text(file, text)
    print(f"wrote {file}, {file.stat().st_size / 1e6:.1f} MB: open it in a browser")


def predict(args):
    """What a fine-tuned model says of new texts: classes, scores or answers, as a TSV table."""
    file = Path("/dev/stdin" if args.file == "-" else args.file)
    device, _, _ = choose_device(args.device, "float32")  # the table is alone on stdout
    header, rows = predict_file(args.run, file, device)
    text = tsv_text([header, *rows])
    if not args.out:
        print(text, end="")
        return
    write_text(f"{args.out}.tsv", text)
    print(f"wrote {args.out}.tsv: {len(rows):,} rows")


def open_language_model(args, causal):
    """The masked or causal language model args.run on args.device, its tokenizer and checkpoint."""
    checkpoint, vocab = find_weights(args.run)
    model, tokenizer = load_model(checkpoint).eval(), load_tokenizer(vocab)
    if not isinstance(model, MaskedLM):
        raise UserError(f"{checkpoint}: a fine-tuned checkpoint has no language-model head")
    check_objective(args.run, vars(model.bert.config), causal)
    device, _, line = choose_device(args.device, "float32")
    print(line)
    return model.to(device), tokenizer, checkpoint


@torch.no_grad()
def show_predictions(args, model, tokenizer, texts):
    """Print the likeliest tokens at some positions of texts, the slots read there, and what else
    reads those. texts: each (its heading, its ids, {title: position})."""
    found, contexts = [], None
    for heading, ids, positions in texts:
        ids, where = (torch.tensor([numbers], device=model.bias.device)
                      for numbers in (ids, list(positions.values())))
        reads = {}  # {layer: (slots, weights) of this text}
        with watch_reads(model, lambda layer, *read, reads=reads: reads.update({layer: read})):
            logits = model(ids, positions=where)[0]
        found.append((heading, positions, logits, reads))
    try:
        if reads:
            *_, contexts = read_corpus(args, model)
    except UserError as error:  # a run can be used without its corpus
        if args.data:
            raise
        print(f"what else reads the slots is not shown: {error}")
    for heading, *guesses in found:
        print(heading)
        show_guesses(tokenizer, *guesses, contexts)


def show_guesses(tokenizer, positions, logits, reads, contexts):
    """Print what show_predictions found for a text; contexts: read_corpus's function, or None."""
    for (title, position), probabilities in zip(positions.items(), logits.softmax(1), strict=True):
        print(f"{title}:")
        best = probabilities.topk(5)
        for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {p:6.1%}  {tokenizer.id_to_token(token)}")
        for layer, parts in reads.items():
            slots, weights = (part[position].tolist() for part in parts)  # (heads, topk)
            print(f"  layer {layer} read, slot (weight), best 3 of {len(slots[0])} per head; what "
                  "else reads the best")
            for head, (best, weight) in enumerate(zip(slots, weights, strict=True), 1):
                read = [f"{s} ({w:.2f})" for s, w in zip(best[:3], weight[:3], strict=True)]
                print(f"    head {head}: {'  '.join(read)}")
                for w, context in contexts(layer, best[0]) if contexts else ():
                    print(f"      ({w:.2f}) {context}")


def fill(args):
    """The likeliest words for each [MASK], the slots read there, and what else reads those."""
    model, tokenizer, checkpoint = open_language_model(args, causal=False)
    *_, cls, sep, mask = special_tokens(tokenizer.get_vocab())
    texts = []
    for text in args.texts:
        ids = tokenizer.encode(cls + text.replace("[MASK]", mask) + sep).ids
        positions = {f"[MASK] at token {i}": i for i, token in enumerate(ids)
                     if token == tokenizer.token_to_id(mask)}
        if not positions:
            raise UserError(f"no [MASK] in {text!r}: write one where a word is to be guessed")
        texts.append((f"{checkpoint}: {text}", ids, positions))
    show_predictions(args, model, tokenizer, texts)


def sample(args):
    """Continue a text; before that, what the next token may be, and the slots read for it."""
    if not args.temperature >= 0:
        raise UserError(f"--temperature {args.temperature}: expected 0 or more")
    model, tokenizer, checkpoint = open_language_model(args, causal=True)
    *_, sep, _ = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(sep + args.text).ids  # [SEP]: a document begins
    window = trained_on(args.run)[0]
    seen = ids[-window:]
    show_predictions(args, model, tokenizer,
                     [(f"{checkpoint}: {args.text}", seen, {"next": len(seen) - 1})])
    generator = torch.Generator().manual_seed(args.seed)
    for number in range(1, args.samples + 1):
        new = model.generate(ids, args.tokens, window, args.temperature, args.top_k, generator)
        print(f"sample {number}: {tokenizer.decode(new[1:], skip_special_tokens=False)}")


def main(argv=None):
    parser = Parser(description=__doc__)
    option = parser.commands(table, glue, by_class, staleness, curves, slots, fill, sample,
                             browse, predict)
    number = {"type": whole_number, "metavar": "N"}
    option("table glue by_class staleness curves", "runs", nargs="+", metavar="out/RUN")
    option("slots fill sample browse", "run", metavar="RUN",
           help="out/<run>, or one of its checkpoints")
    option("predict", "run", metavar="RUN", help="a fine-tuned run, or one of its seeds")
    option("predict", "file", metavar="FILE",
           help="TSV with a header, SQuAD's JSON, or - for stdin")
    option("fill", "texts", nargs="+", metavar="TEXT", help="a text with [MASK] in it, in quotes")
    option("sample", "text", help="a text that is to go on, or ''; [SEP] ends a document")
    option("sample", "--tokens", **number, default=40, help="to add (40)")
    option("sample", "--samples", **number, default=1, help="(1)")
    option("sample", "--temperature", type=float, default=0.8, metavar="T",
           help="0: always the likeliest token (0.8)")
    option("sample", "--top_k", **number, default=50, help="draw from the N likeliest (50)")
    option("sample", "--seed", type=int, default=0, metavar="N", help="(0)")
    option("table", "--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it")
    option("by_class", "--data", metavar="TASK", help="instead of the one of the fine-tuned run")
    option("slots fill sample browse", "--data", metavar="NAME",
           help="data/NAME, not the run's corpus")
    option("table", "--usage_data", metavar="NAME", help="where usage is counted (first of --data)")
    option("table by_class", "--split", choices=("train", "dev"), default="train", help="(train)")
    option("table by_class", "--sequences", **number, help="a quick look at N, evenly spread (all)")
    option("slots fill sample browse", "--sequences", **number, default=512,
           help="of its test text (512)")
    option("table", "--repeats", **number, default=1, help="maskings (1)")
    option("table", "--batch_size", **number, default=8, help="sequences (8)")
    option("slots", "--layer", type=int, required=True, help="counted from 1")
    option("slots", "--slot", type=int, nargs="+", default=[], metavar="N", help="these slots")
    option("slots", "--most", **number, default=10, help="or the N most read (10)")
    option("slots fill sample", "--contexts", **number, default=3, help="for a slot (3)")
    option("browse", "--contexts", **number, default=8, help="for a slot (8)")
    option("table by_class slots fill sample browse predict", "--device", default="auto",
           help="cuda, mps, cpu")
    option("table", "--dtype", default="auto", help="float32, bfloat16, float16")
    out = {"metavar": "NAME",
           "type": lambda name: re.sub(r"\.(md|json|png|svg|html|tsv)$", "", name)}
    option("table glue by_class staleness curves slots", "--out", **out,
           help="write the results to NAME.md, NAME.json, ...")
    option("browse", "--out", **out, required=True, help="write NAME.html")
    option("predict", "--out", **out, help="write NAME.tsv instead of printing")
    args = parser.parse_args(argv)
    if is_distributed() and args.command != "table":
        raise UserError(f"{args.command}: one process does it: python measure.py; torchrun is for "
                        "table")
    args.call(args)


if __name__ == "__main__":
    run_ranks(main)
