"""
Measure trained models: the memory tables and figures of Kim & Jung (2020).

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py table out/base_resm_init_sst2               # Table 6
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py slots out/demo_resm_init --layer 2          # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py sample out/demo_causal_memory "Returns a new"   # a causal language model
$ python measure.py browse out/demo_resm_init --out memory      # memory.html: what a slot knows
$ python measure.py predict out/base_sst2 new.tsv --out said    # a fine-tuned run on new text

--out NAME writes a table to NAME.md and NAME.json, a figure to NAME.png and NAME.svg. For browse it
writes NAME.html, for predict NAME.tsv. python measure.py COMMAND --help lists a command's options.
"""
from pathlib import Path

import numpy as np
import torch

from lib.browse import (
    CorpusReads,
    check_language_model,
    compare_classes,
    count_task_reads,
    page_data,
    page_html,
    print_guess,
    training_examples,
    training_text,
)
from lib.corpus import causal_heldout, masked_heldout
from lib.device import Progress, choose_device, use_device
from lib.distributed import run_ranks
from lib.errors import UserError
from lib.figures import draw_class_distances, draw_curves, draw_staleness, usage_cells, write_table
from lib.files import write_text
from lib.predict import predict_file
from lib.run import Run
from lib.settings import Parser
from lib.tasks import score_table, tsv_text
from lib.tokenizer import load_tokenizer, special_tokens
from lib.usage import evaluate_language_model, open_corpus, tally, usage_metrics
from lib.weights import find_weights, load_model, read_weights
from model import value_tables


def table(args):
    """Print Table 2 (perplexity and slot usage, with --data) or 6 (usage of fine-tuned runs)."""
    device, dtype = use_device(args.device, args.dtype)
    if args.data:
        table_2(args, device, dtype)
    else:
        table_6(args, device)


def table_2(args, device, dtype):
    """Evaluate language models on test splits, with the same batches for all."""
    causal = read_weights(args.runs[0])["config"].causal
    for path in args.runs:
        check_language_model(path, causal)
    seq_len = min(training_text(path)[0] for path in args.runs)
    heldout = {}
    for name in args.data:
        text = open_corpus(name, *args.runs), "test", seq_len, 8, args.sequences
        if causal:  # windows overlap by half, and each token is predicted once
            heldout[name] = causal_heldout(*text, stride=seq_len // 2)
        else:
            heldout[name] = masked_heldout(*text)
    rows, records = [], []
    for path in args.runs:
        checkpoint, _ = find_weights(path)
        print(f"{path}: weights of {checkpoint}")
        model = load_model(checkpoint).to(device)
        row = {"run": path, **Run(checkpoint.parent).steps_and_seed(checkpoint)}
        record = {"checkpoint": str(checkpoint), **row, "results": {}}
        for name, batches in heldout.items():
            batches = Progress(batches, f"{path}, data/{name}")
            results, _ = evaluate_language_model(model, batches, device, dtype)
            record["results"][name] = [results]
            row[f"{name} ppl"] = results["perplexity"]
        [results] = record["results"][args.data[0]]
        rows.append({**row, **usage_cells(results["layers"])})
        records.append(record)
    note = (f"Test splits, {args.sequences or 'all'} sequences of {seq_len}. Sequences of a "
            "causal model overlap by half, and its usage counts a token in both. Usage on "
            f"data/{args.data[0]}. Steps: those of the initial model + the run's own. Only rows "
            "with the same number of steps show what the memory does. Each is one run of one seed, "
            "and another seed alone changes the perplexity: run several before you trust a small "
            "difference.")
    write_table(args.out, rows, note, {"note": note, "runs": records})


def table_6(args, device):
    """Count what each fine-tuned model reads in the training examples of its task."""
    rows, records = [], []
    for path in args.runs:
        task, examples = training_examples(path, args.sequences)
        counts = count_task_reads(path, examples, device)
        layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
        facts = {"run": path, "task": task, "examples": len(examples)}
        rows.append({**facts, **usage_cells(layers)})
        records.append({**facts, "layers": layers})
    note = "The best epoch so far, train split, nothing masked, padding not counted."
    write_table(args.out, rows, note, records)


def glue(args):
    """Print Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    rows, records = score_table(args.runs)
    if not rows:
        raise UserError(f"{', '.join(args.runs)}: no fine-tuned run that is done")
    note = ("Dev splits, median over the seeds of each seed's best epoch; -: not run. "
            "squad: exact match/F1; mnli: matched/mismatched; cola: Matthews' correlation. "
            "Avg: of the six numbers from mnli to cola, once all are there.")
    write_table(args.out, rows, note, records)


def by_class(args):
    """Draw Figure 4: how far apart two classes' slots are, before and after fine-tuning."""
    if args.out:
        import matplotlib  # noqa: F401 - a figure is drawn after long work
    device, _ = use_device(args.device, "float32")
    records = []
    for path in args.runs:
        records += compare_classes(path, args.sequences, device)
    note = ("Top-1 slots, train split: KL(class 1 || 0.9 class 0 + 0.1 class 1) in nats, at most "
            "2.30, and IOU of the shares of the slots. Floor: the same between two random halves "
            "of one class. Accesses: of each half.")
    figure = args.out and draw_class_distances(records)
    write_table(args.out, records, note, records, figure)


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
    note = ("Share of the slots by the step of the last snapshot at which they were top-1. "
            "Accesses: in a snapshot.")
    figure = args.out and draw_staleness(records)
    write_table(args.out, rows, note, records, figure)


def curves(args):
    """Draw Figure 3: perplexity and top-1 usage against the step, for several runs."""
    runs, rows, first = {}, [], None
    for path in args.runs:
        runs[path] = Run(path).evaluations()
        last = runs[path][-1]
        facts = Run(path).settings() | last
        first = first or facts
        for key in ("objective", "data", "seq_len", "masked_tokens"):
            if facts[key] != first[key]:
                raise UserError(f"{path} has another {key} than {args.runs[0]}: their perplexities "
                                "cannot be compared")
        usage = [f"{metrics['top1_mu']:.1%}" for metrics in last["layers"].values()]
        rows.append({"run": path, "steps": last["step"], "ppl": last["perplexity"],
                     "accuracy": last["accuracy"], "layers": "/".join(last["layers"]),
                     "top-1 MU": "/".join(usage)})
    note = "Held-out text; the steps of the initial model count."
    figure = args.out and draw_curves(runs)
    write_table(args.out, rows, note, runs, figure)


def open_model(args):
    """Load the model of args.run, and read a corpus with it.

    Returns (model, folder of its weights, CorpusReads). The last is None without a memory.
    """
    checkpoint, _ = find_weights(args.run)
    device, _ = use_device(args.device, "float32")
    model = load_model(checkpoint).eval().to(device)
    if not value_tables(model):
        return model, checkpoint, None
    return model, checkpoint, CorpusReads(model, args.run, args.data, args.sequences)


def slots(args):
    """Show the most read slots of a layer, with contexts."""
    model, checkpoint, corpus = open_model(args)
    if args.layer not in value_tables(model):
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{list(value_tables(model))}")
    slots, weights = corpus.layers[args.layer]
    counts = tally(slots, weights, corpus.n_keys**2)
    read, top1 = counts["read"], counts["top1"]
    rows, records = [], []
    for slot in np.argsort(-read, kind="stable")[:args.most].tolist():
        facts = {"slot": slot, "reads": int(read[slot]), "top1": int(top1[slot])}
        contexts = corpus.contexts(args.layer, slot, args.contexts)
        records.append({**facts, "contexts": contexts})
        for weight, context in contexts or [(0.0, "(never read)")]:
            rows.append({**facts, "weight": weight, "context": context})
    note = (f"Layer {args.layer} of {checkpoint}; {len(slots):,} tokens of data/{corpus.name} x "
            f"{slots.shape[1]} heads; weights are summed over the heads.")
    write_table(args.out, rows, note, records)


def fill(args):
    """Guess each [MASK]; show the slots read there, and what else reads those."""
    check_language_model(args.run, causal=False)
    model, checkpoint, corpus = open_model(args)
    tokenizer = load_tokenizer(find_weights(args.run)[1])
    special = special_tokens(tokenizer.get_vocab())
    mask_id = tokenizer.token_to_id(special.mask)
    masked = args.text.replace("[MASK]", special.mask)
    ids = tokenizer.encode(special.cls + masked + special.sep).ids
    if mask_id not in ids:
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    print(f"{checkpoint}: {args.text}")
    for position in np.flatnonzero(np.equal(ids, mask_id)):
        print(f"[MASK] at token {position}:")
        print_guess(model, tokenizer, ids, position, corpus, args.contexts)


def sample(args):
    """Continue a text; show first the likeliest next tokens and the slots read for them."""
    check_language_model(args.run, causal=True)
    model, checkpoint, corpus = open_model(args)
    tokenizer = load_tokenizer(find_weights(args.run)[1])
    start = special_tokens(tokenizer.get_vocab()).sep  # a document begins
    ids = tokenizer.encode(start + args.text).ids
    window, _ = training_text(args.run)
    print(f"{checkpoint}: {args.text}\nnext:")
    print_guess(model, tokenizer, ids[-window:], -1, corpus, args.contexts)
    generator = torch.Generator().manual_seed(args.seed)
    for number in range(1, args.samples + 1):
        new = model.generate(ids, args.tokens, window, args.temperature, args.top_k, generator)
        print(f"sample {number}: {tokenizer.decode(new[1:], skip_special_tokens=False)}")


def browse(args):
    """Write an HTML page of what slots know: usage, contexts, a search for tokens."""
    _, checkpoint, corpus = open_model(args)
    if not corpus:
        raise UserError(f"{args.run}: a model without memory has no slots")
    note = (f"{checkpoint.name}: what {corpus.ids.size:,} tokens of data/{corpus.name}'s test text "
            "read, nothing masked")
    data = page_data(corpus, args.contexts)
    path = args.out.removesuffix(".html") + ".html"
    write_text(path, page_html({"title": args.run, "note": note, **data}))
    print(f"wrote {path}: open it in a browser")


def predict(args):
    """Predict for new texts with a fine-tuned model; print or write a TSV table."""
    device, _, _ = choose_device(args.device)  # the table is alone on stdout
    file = Path("/dev/stdin" if args.file == "-" else args.file)
    header, rows = predict_file(args.run, file, device)
    text = tsv_text([header, *rows])
    if args.out:
        write_text(f"{args.out}.tsv", text)
    else:
        print(text, end="")


def command_line():
    """Make the parser: a section for each command, in the order of the docstring above."""
    parser = Parser(description=__doc__)
    sections = parser.add_subparsers(required=True, metavar="COMMAND")

    def begin(command, *parents):
        section = sections.add_parser(command.__name__, help=command.__doc__, parents=parents)
        section.set_defaults(call=command)
        return section.add_argument

    runs, device, reader, guess = (Parser(add_help=False) for _ in range(4))  # of several commands
    runs.add_argument("runs", nargs="+", metavar="out/RUN")
    runs.add_argument("--out", metavar="NAME", help="write NAME.md and NAME.json")
    device.add_argument("--device", default="auto", help="auto, cuda, mps or cpu")
    reader.add_argument("run", metavar="RUN", help="out/RUN, or one of its checkpoints")
    reader.add_argument("--data", metavar="NAME", help="data/NAME, not the run's corpus")
    reader.add_argument("--sequences", type=int, default=512, help="of its test text (512)")
    guess.add_argument("--contexts", type=int, default=3, help="of a slot (3)")

    option = begin(table, runs, device)
    option("--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it (Table 2)")
    option("--sequences", type=int, help="a quick look at so many, spread evenly")
    option("--dtype", default="float32", help="auto, float32, bfloat16 or float16")

    begin(glue, runs)

    option = begin(by_class, runs, device)
    option("--sequences", type=int, help="a quick look at so many examples, spread evenly")

    begin(staleness, runs)
    begin(curves, runs)

    option = begin(slots, reader, device, guess)
    option("--layer", type=int, required=True, help="counted from 1")
    option("--most", type=int, default=10, help="how many slots (10)")
    option("--out", metavar="NAME", help="write NAME.md and NAME.json")

    option = begin(fill, reader, device, guess)
    option("text", help="a text with [MASK] in it, in quotes")

    option = begin(sample, reader, device, guess)
    option("text", help="the prompt, or '' for none; [SEP] ends a document")
    option("--tokens", type=int, default=40, help="to add (40)")
    option("--samples", type=int, default=1, help="how many continuations (1)")
    option("--temperature", type=float, default=0.8, help="0: the likeliest token (0.8)")
    option("--top_k", type=int, default=50, help="draw from so many likeliest tokens (50)")
    option("--seed", type=int, default=0, help="of the draws (0)")

    option = begin(browse, reader, device)
    option("--contexts", type=int, default=8, help="of a slot (8)")
    option("--out", required=True, metavar="NAME", help="write NAME.html")

    option = begin(predict, device)
    option("run", metavar="RUN", help="a fine-tuned out/RUN, or one of its seeds")
    option("file", metavar="FILE", help="TSV with a header, SQuAD's JSON, or - (stdin)")
    option("--out", metavar="NAME", help="write NAME.tsv")
    return parser


def main(argv=None):
    args = command_line().parse_args(argv)
    args.call(args)


if __name__ == "__main__":
    run_ranks(main)
