"""
Measure trained models: the memory tables and figures of Kim & Jung (2020).

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py table out/base_resm_init_sst2               # Table 6: fine-tuned runs
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py slots out/demo_resm_init --layer 2          # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py sample out/demo_causal_memory "Returns a new"   # a causal language model
$ python measure.py browse out/demo_resm_init --out memory      # memory.html: what a slot knows
$ python measure.py predict out/base_sst2 new.tsv --out said    # a fine-tuned run on new text

--out NAME writes NAME.md and NAME.json, and for a figure NAME.png and NAME.svg, too. For browse it
writes NAME.html, for predict NAME.tsv. python measure.py COMMAND --help lists a command's options.
"""
import itertools
import os
import sys
from pathlib import Path

import numpy as np
import torch

from lib.corpus import causal_heldout, masked_heldout, open_corpus
from lib.device import to_device, use_device
from lib.files import markdown, to_json, write_text
from lib.ranks import Progress, deal_batches, run_ranks, sum_over_ranks
from lib.run import Run, read_state
from lib.settings import Parser, UserError
from lib.slots import (
    continue_text,
    load_with_tokenizer,
    open_model,
    page_data,
    page_html,
    print_guess,
    training_text,
    usage_cells,
)
from lib.squad import best_answers, make_windows, read_squad
from lib.tasks import (
    batches_by_length,
    encode_examples,
    find_task,
    load_examples,
    pad,
    pick_texts,
    predict_examples,
    prediction_table,
    read_table,
    score_row,
    task_name,
    tsv_text,
)
from lib.tokenizer import special_tokens, text_tokenizer
from lib.training import evaluate_language_model
from lib.usage import count_reads, usage_metrics
from lib.weights import (
    check_objective,
    find_weights,
    load_model,
    median_seed,
    read_weights,
    trained_on,
)
from model import SpanReader, value_tables


def table(args):
    """Print Table 2 (perplexity and slot usage, with --data) or 6 (usage of fine-tuned runs)."""
    device, _ = use_device(args.device, "float32")
    if args.data:
        table_2(args, device)
    else:
        table_6(args, device)


def table_2(args, device):
    """Evaluate language models on whole test splits, with the same batches for all."""
    causal = read_weights(args.runs[0])["config"].causal
    for path in args.runs:
        check_language_model(path, causal)
    seq_len = min(training_text(path)[0] for path in args.runs)
    heldout, tokens = {}, {}
    for name in args.data:
        corpus = open_corpus(name, *args.runs, seen=args.seen)
        tokens[name] = len(corpus.split("test"))
        if causal:  # windows overlap by half: a token is predicted once, and its reads count twice
            heldout[name] = causal_heldout(corpus, "test", seq_len, 8, stride=seq_len // 2)
        else:
            heldout[name] = masked_heldout(corpus, "test", seq_len, 8)
    longest = max(tokens, key=tokens.get)
    rows, records = [], []
    for path in args.runs:
        checkpoint, _ = find_weights(path)
        model = load_model(checkpoint).to(device)
        row = {"run": path, **how_trained(checkpoint)}
        record = {"checkpoint": str(checkpoint), **row, "results": {}}
        for name, batches in heldout.items():
            batches = Progress(batches, f"{path}, data/{name}")
            results, _ = evaluate_language_model(model, batches, device)
            record["results"][name] = [results]
            row[f"{name} ppl"] = results["perplexity"]
            if name == longest:
                usage = usage_cells(results["layers"])
        rows.append({**row, **usage})
        records.append(record)
    note = (f"Test splits, sequences of {seq_len}. Usage on data/{longest}, the longest "
            f"({tokens[longest]:,} tokens; our reading). Steps: those of the initial model + the "
            "run's own, which took so many seconds. Only rows with the same number of steps show "
            "what the memory does.")
    write_table(args.out, rows, note, {"note": note, "runs": records})


def how_trained(checkpoint):
    """Return how a checkpoint was trained: {"steps": "1,000 + 3,000", "seed": 1, "seconds": 95}.

    The steps are those of its initial models and its own. "?" stands for Hugging Face's weights.
    """
    if not (checkpoint / "state.pt").is_file():
        return {"steps": "?", "seed": "?", "seconds": "?"}
    settings, state = Run(checkpoint.parent).settings(), read_state(checkpoint)
    steps = f"{state['step']:,}"
    first = settings["first_step"]
    if first:
        steps = f"{first:,} + {steps}"
    public = any(text["train"] is None and not Path(text["name"], "state.pt").is_file()
                 for text in trained_on(checkpoint))  # Hugging Face's weights were at the beginning
    if settings["init_checkpoint"] and (public or not first):
        steps = f"? + {steps}"
    seconds = round(state["elapsed"] + state["seconds"])
    return {"steps": steps, "seed": settings["seed"], "seconds": seconds}


def check_language_model(path, causal):
    """Raise UserError unless `path` has a language model: causal if `causal`, else masked."""
    saved = read_weights(path)
    if saved.get("head"):
        raise UserError(f"{path}: a fine-tuned checkpoint has no language-model head")
    check_objective(path, saved["config"], causal)
    if "transform.weight" not in saved["weights"]:
        raise UserError(f"{path}: no masked-LM head: train one first: python pretrain.py "
                        f"configs/own_bert_resm.py --init_from={path}")


def table_6(args, device):
    """Count what each fine-tuned model reads in texts of its task: dev, then train."""
    rows, records = [], []
    for path, split in itertools.product(args.runs, ("dev", "train")):
        facts, examples = task_examples(path, split)
        counts = count_task_reads(path, examples, device)
        layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
        records.append({"run": path, **facts, "layers": layers})
        rows.append({"run": path, **facts, **usage_cells(layers)})
    note = ("Best epoch so far, dev (MNLI: matched) and train: the paper names no split. Padding "
            "does not count as an access.")
    write_table(args.out, rows, note, records)


def task_examples(path, split):
    """Load a split of a fine-tuned run's task, "train" or "dev" (MNLI: matched).

    Returns {"task", "split", "examples": their number} and the Examples, or SQuAD's Windows.
    """
    checkpoint, vocab = find_weights(path)
    settings = Run(checkpoint.parent).settings()
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run (others: measure.py table RUN --data NAME)")
    task = find_task(settings["task"])
    if split == "dev":
        split = task.dev[""]
    examples = load_examples(task, split, text_tokenizer(vocab), settings["max_len"],
                             settings["doc_stride"])
    return {"task": task.name, "split": split, "examples": len(examples)}, examples


@torch.no_grad()
def count_task_reads(path, examples, device):
    """Count what the model at `path` reads in Examples or Windows (see count_reads)."""
    model = load_model(path).to(device).eval()
    lengths = np.array([len(example.ids) for example in examples])
    with count_reads(value_tables(model), sum_over_ranks) as counts:
        for index in deal_batches(Progress(batches_by_length(lengths, 32), path)):
            batch = pad([examples[n] for n in index])
            model.bert(**to_device(batch, device))
    return counts


def glue(args):
    """Print Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    systems = {}  # {(initial model, update_memory): {task: eval_results.json}}
    hashes = {}  # of the initial models
    for path in args.runs:
        results = Run(path).results()
        if not results:
            continue
        settings = Run(path).seeds()[0].settings()
        task = task_name(settings["task"])
        initial, sha256 = Path(settings["init_from"]), settings.get("init_sha256")
        if sha256 and hashes.setdefault(initial, sha256) != sha256:
            raise UserError(f"{path} started from other weights of {initial} than a run before it: "
                            "the model was trained anew; fine-tune all runs from one")
        tasks = systems.setdefault((initial, settings["update_memory"]), {})
        if task in tasks:
            raise UserError(f"{path}: a second run of {task} from {settings['init_from']}: name "
                            "only one")
        tasks[task] = results
    if not systems:
        raise UserError(f"{', '.join(args.runs)}: no fine-tuned run that is done")
    rows = [score_row(*system, tasks) for system, tasks in systems.items()]
    empty = {name for name in rows[0] if all(row.get(name) is None for row in rows)}
    rows = [{name: row[name] for name in row if name not in empty} for row in rows]
    note = ("Dev splits, median over the seeds of each seed's best epoch; (n): of n seeds. "
            "squad: exact match/F1; mnli: matched/mismatched; cola: Matthews' correlation. "
            "Avg: of the six numbers from mnli to cola, once all are there.")
    write_table(args.out, rows, note, rows)


def by_class(args):
    """Draw Figure 4: how far apart two classes' slots are, before and after fine-tuning."""
    device, _ = use_device(args.device, "float32")
    records = []
    for path in args.runs:
        labels = read_weights(path).get("labels")
        if not labels:
            raise UserError(f"{path}: by_class compares classes, this model knows none")
        _, examples = task_examples(path, "train")
        parts = draw_parts(examples)
        negative, positive = (labels[part[0].label] for part in parts[::3])
        facts = {"run": path, "split": "train", "classes": f"{positive} against {negative}"}
        start = Run(find_weights(path)[0].parent).settings()["init_checkpoint"]
        for when, weights in (("before", start), ("after", path)):
            counts = [count_task_reads(weights, part, device) for part in parts]
            for layer in counts[0]:
                top1 = np.array([part[layer]["top1"] for part in counts])  # (6, n_slots)
                records.append({**facts, "when": when, "layer": layer,
                                **class_distances(top1[3:5], top1[:2]),
                                **whole_distances(top1[3:].sum(0), top1[:3].sum(0)),
                                "accesses": int(top1[[0, 1, 3, 4]].sum()) // 4})
    note = ("Whole: the paper's KL (nats) and IOU of top-1 slots; KL over slots that both classes "
            "read, which have the share `shared` of their reads. Between: KL(p || 0.9 q + 0.1 p) "
            "and IOU of random halves of the classes. Floor: of two halves of one class. Accesses: "
            "of a half.")
    rows = [{"kl_whole (slots of both)" if key == "kl_whole" else key: value
             for key, value in record.items()} for record in records]
    write_table(args.out, rows, note, records, draw_class_distances)


def draw_parts(examples):
    """Part the examples of the two largest classes, at random.

    Returns six lists of Examples, three of each class, the lower class first. The first two of a
    class have as many Examples as half of the smaller class. The third has the others.
    """
    rng = np.random.default_rng(0)
    labels = np.array([example.label for example in examples])
    counts = np.bincount(labels)
    classes = np.sort(np.argsort(-counts, kind="stable")[:2])
    size = counts[classes].min() // 2
    parts = []
    for label in classes:
        drawn = [examples[n] for n in rng.permutation(np.flatnonzero(labels == label))]
        parts += [drawn[:size], drawn[size:2 * size], drawn[2 * size:]]
    return parts


def whole_distances(positive, negative):
    """Compute the paper's KL(t+ || t-), in nats, and IOU of two classes (Figure 4).

    positive, negative: top-1 counts (n_slots,) of all examples of a class. The KL is infinite where
    only positive examples read a slot. It is taken over the slots that both classes read, whose
    shares are normalised again (our reading). "shared": the share of the reads there, the mean of
    both classes.
    """
    p = positive / positive.sum()
    q = negative / negative.sum()
    iou = np.minimum(p, q).sum() / np.maximum(p, q).sum()
    both = (p > 0) & (q > 0)
    p, q = p[both], q[both]
    shared = (p.sum() + q.sum()) / 2
    return {"kl_whole": divergence(p / p.sum(), q / q.sum()), "shared": shared, "iou_whole": iou}


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). p and q are
    the slots' shares in a half of the positive and of the negative class. Our reading:
    - kl_between is KL(p || 0.9 q + 0.1 p) in nats, the mean over the four pairs of halves. The
      0.1 p bounds it by log 10.
    - iou_between is the sum of min(p, q) over the sum of max(p, q). Each sum is first averaged over
      the four pairs.
    - kl_floor and iou_floor compare the halves of one class: the noise of few accesses.
    """
    positive = positive / positive.sum(1, keepdims=True)
    negative = negative / negative.sum(1, keepdims=True)
    pairs = {"between": list(itertools.product(positive, negative)),
             "floor": [*itertools.permutations(positive), *itertools.permutations(negative)]}
    distances = {}
    for kind, shares in pairs.items():
        common = np.mean([np.minimum(p, q).sum() for p, q in shares])
        distances[f"kl_{kind}"] = np.mean([divergence(p, 0.9 * q + 0.1 * p) for p, q in shares])
        distances[f"iou_{kind}"] = common / (2 - common)  # the shares of each half sum to 1
    return distances


def divergence(p, q):
    """Compute KL(p || q) in nats, of shares (n_slots,). q is above 0 where p is."""
    read = p > 0
    return (p[read] * np.log(p[read] / q[read])).sum()


def draw_class_distances(records):
    """Draw Figure 4: KL and IOU between the two classes, each beside its noise floor.

    records: by_class's, one for each run, layer and moment.
    """
    figure, [panels] = subplots(1, 2, 0.55 * len(records) + 1.2, sharey=True)
    places = np.arange(len(records))
    labels = [f"{Path(record['run']).name}\nlayer {record['layer']}, {record['when']}"
              for record in records]
    kinds = {"between": "two classes", "floor": "two halves of one class"}
    for axes, key in zip(panels, ("kl", "iou")):
        for shift, (kind, label) in zip((-0.2, 0.2), kinds.items()):
            lengths = [record[f"{key}_{kind}"] for record in records]
            bars = axes.barh(places + shift, lengths, 0.4, label=label)
            axes.bar_label(bars, fmt="%.2f")
        axes.margins(x=0.3)  # room for the labels
    panels[0].set_title("KL (nats)")
    panels[1].set_title("IOU")
    panels[0].set_yticks(places, labels)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left")
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
                last = np.where(top1 > 0, number, last)
            shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
            shares = dict(zip(["never", *snapshots], shares.tolist(), strict=True))
            facts = {"run": path, "layer": layer, "accesses": int(top1.sum())}
            records.append({**facts, "slots": shares})
            rows.append({**facts, **{step: f"{share:.1%}" for step, share in shares.items()}})
    note = ("Share of the slots by the step of the last snapshot at which they were top-1. A "
            "snapshot counts accesses in the run's held-out sequences.")
    write_table(args.out, rows, note, records, draw_staleness)


def draw_staleness(records):
    """Draw Figure 2: a panel for each run and layer, a bar for each snapshot and for "never".

    records: {"run", "layer", "slots": {step of a snapshot or "never": share of the slots}}.
    """
    figure, panels = subplots(len(records), 1, 1.7 * len(records) + 0.5, sharey=True)
    for axes, record in zip(panels.flat, records, strict=True):
        steps = list(map(str, record["slots"]))
        shares = [100 * share for share in record["slots"].values()]
        bars = axes.bar(steps, shares)
        axes.bar_label(bars, fmt="%.1f")
        axes.set_ylim(0, 115)
        axes.set_title(f"{Path(record['run']).name}, layer {record['layer']}")
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
        color = f"C{number}"
        steps = [evaluation["step"] for evaluation in log]
        perplexity = [evaluation["perplexity"] for evaluation in log]
        upper.plot(steps, perplexity, color=color, label=Path(path).name)
        for layer, line in zip(log[-1]["layers"], itertools.cycle(("-", "--", "-.", ":"))):
            usage = [100 * evaluation["layers"][layer]["top1_mu"] for evaluation in log]
            lower.plot(steps, usage, line, color=color, label=f"{Path(path).name}, layer {layer}")
    last = [log[-1]["perplexity"] for log in runs.values()]
    upper.set_yscale("log")
    upper.set_ylim(0.9 * np.nanmin(last), 2 * np.nanmax(last))  # nan: diverged
    upper.yaxis.set_minor_formatter("{x:g}")
    upper.set_title("perplexity on held-out text (log scale)")
    upper.legend()
    lower.set_ylim(0, 102)
    lower.set_title("top-1 memory usage (% of slots)")
    lower.set_xlabel("training steps, with those of the initial model")
    lower.legend()
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
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = f"{markdown(columns, [map(row.get, columns) for row in rows])}\n{note}\n"
    print(text, end="")
    if not out:
        return
    if not Path(f"{out}.json").exists():  # else an earlier table is replaced
        new_file(out, ".md")
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
    model, _, corpus = open_model(args.run, args.data, args.device, args.seen)
    layers = value_tables(model)
    if args.layer not in layers:
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{list(layers)}")
    reads = corpus.reads[args.layer]
    rows, records = [], []
    for slot in reads.top_slots(10):
        facts = {"slot": slot, "reads": int(reads.counts["read"][slot]),
                 "top1": int(reads.counts["top1"][slot])}
        contexts = []
        for weight, text, _ in corpus.contexts(args.layer, slot, args.contexts):
            contexts.append((weight, text))
            rows.append({**facts, "weight": weight, "context": text})
        records.append({**facts, "contexts": contexts})
    note = f"{corpus.ids.size:,} tokens of data/{corpus.name}; weights are summed over the heads."
    write_table(args.out, rows, note, records)


def fill(args):
    """Guess each [MASK]; show the slots read there, and what else reads those."""
    check_language_model(args.run, causal=False)
    model, tokenizer, corpus = open_model(args.run, args.data, args.device, args.seen)
    special = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(args.text.replace("[MASK]", special.mask)).ids
    positions = np.flatnonzero(np.equal(ids, tokenizer.token_to_id(special.mask)))
    if not len(positions):
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    if len(ids) > model.bert.config.max_len:
        raise UserError(f"the text has more tokens than {args.run} has positions: shorten it")
    if len(ids) > training_text(args.run)[0]:
        print("the model was trained on shorter sequences: positions beyond are untrained")
    for position in positions:
        print(f"[MASK] at token {position}:")
        print_guess(model, tokenizer, ids, position, corpus, args.contexts)


def sample(args):
    """Continue a text with a causal language model."""
    check_language_model(args.run, causal=True)
    device, _ = use_device(args.device, "float32")
    model, tokenizer = load_with_tokenizer(args.run)
    start = special_tokens(tokenizer.get_vocab()).sep  # a document begins
    ids = tokenizer.encode(start + args.text, add_special_tokens=False).ids
    window, _ = training_text(args.run)
    generator = torch.Generator().manual_seed(args.seed)
    ids = continue_text(model.to(device), ids, args.tokens, window, args.temperature, generator)
    print(tokenizer.decode(ids[1:], skip_special_tokens=False))


def browse(args):
    """Write an HTML page of what slots know: usage, contexts, a search for tokens."""
    path = new_file(args.out, ".html")
    _, _, corpus = open_model(args.run, args.data, args.device, args.seen)
    if not corpus:
        raise UserError(f"{args.run}: a model without memory has no slots")
    note = f"What {corpus.ids.size:,} tokens of data/{corpus.name} read, nothing masked"
    data = page_data(corpus, args.contexts)
    write_text(path, page_html({"title": args.run, "note": note, **data}))
    print(f"wrote {path}: open it in a browser")


def predict(args):
    """Predict for new texts with a fine-tuned model's median seed; print or write a TSV table.

    It has the columns of the file, or ids and questions. Then come the prediction, and a class's
    probability or an answer's score.
    """
    file = Path("/dev/stdin" if args.file == "-" else args.file)
    out = args.out and new_file(args.out, ".tsv")
    folder, vocab = find_weights(median_seed(args.run))
    settings = Run(folder.parent).settings()
    if "task" not in settings:
        raise UserError(f"{args.run}: not a fine-tuned model: python finetune.py makes one")
    device, _ = use_device(args.device, "float32", sys.stderr)  # the table is alone on stdout
    model = load_model(folder).to(device)
    tokenizer, max_len = text_tokenizer(vocab), settings["max_len"]
    if isinstance(model, SpanReader):
        windows = make_windows(tokenizer, read_squad(file), max_len, settings["doc_stride"])
        rows = [["id", "question", "prediction", "score"]]
        answers = best_answers(windows, predict_examples(model, windows))
        for question, (text, score) in answers.items():
            rows.append([question.id, question.text, text, f"{score:.3f}"])
    else:
        given = read_table(file)
        texts = pick_texts(file, given, settings.get("texts"))  # None: an old run
        examples = encode_examples(tokenizer, texts, [None] * len(texts), max_len)
        header, cells = prediction_table(predict_examples(model, examples),
                                         read_weights(folder)["labels"])
        rows = [[*given[0], *header]]
        rows += [[*row.values(), *new] for row, new in zip(given, cells)]
    if out:
        write_text(out, tsv_text(rows))
    else:
        print(tsv_text(rows), end="")


def command_line():
    """Make the parser: a section for each command, in the order of the docstring above."""
    parser = Parser(description=__doc__)
    sections = parser.add_subparsers(required=True, metavar="COMMAND")

    def begin(command, *parents):
        section = sections.add_parser(command.__name__, help=command.__doc__, parents=parents)
        section.set_defaults(call=command)
        return section.add_argument

    runs, device, text, reader = (Parser(add_help=False) for _ in range(4))  # of several commands
    runs.add_argument("runs", nargs="+", metavar="out/RUN")
    runs.add_argument("--out", metavar="NAME", help="write NAME.md, .json; a figure: .png, .svg")
    device.add_argument("--device", default="auto", help="auto, cuda, mps or cpu")
    text.add_argument("--seen", action="store_true",
                      help="read documents that a run was trained on in another split, too")
    reader.add_argument("run", help="out/RUN, or one of its checkpoints")
    reader.add_argument("--data", metavar="NAME", help="data/NAME, not the run's corpus")
    reader.add_argument("--contexts", type=int, default=5, help="of a slot (5)")

    option = begin(table, runs, device, text)
    option("--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it (Table 2)")

    begin(glue, runs)

    begin(by_class, runs, device)
    begin(staleness, runs)
    begin(curves, runs)

    option = begin(slots, reader, device, text)
    option("--layer", type=int, required=True, help="counted from 1")
    option("--out", metavar="NAME", help="write NAME.md and NAME.json")

    option = begin(fill, reader, device, text)
    option("text", help="a text with [MASK] in it, in quotes")

    option = begin(sample, device)
    option("run", help="out/RUN, or one of its checkpoints")
    option("text", help="the prompt, or '' for none; [SEP] ends a document")
    option("--tokens", type=int, default=40, help="to add (40)")
    option("--temperature", type=float, default=0.8, help="0: the likeliest token (0.8)")
    option("--seed", type=int, default=0, help="of the draws (0)")

    option = begin(browse, reader, device, text)
    option("--out", required=True, metavar="NAME", help="write NAME.html")

    option = begin(predict, device)
    option("run", help="a fine-tuned out/RUN, or one of its seeds")
    option("file", help="TSV with a header, SQuAD's JSON, or - (stdin)")
    option("--out", metavar="NAME", help="write NAME.tsv")
    return parser


def main(argv=None):
    args = command_line().parse_args(argv)
    args.call(args)


if __name__ == "__main__":
    run_ranks(main)
