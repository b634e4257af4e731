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

--out NAME writes a table to NAME.md and NAME.json, a figure to NAME.png and NAME.svg. For browse it
writes NAME.html, for predict NAME.tsv. python measure.py COMMAND --help lists a command's options.
"""
from pathlib import Path

import numpy as np
import torch

from lib.browse import (
    check_language_model,
    compare_classes,
    open_model,
    page_data,
    page_html,
    print_guess,
    steps_and_seed,
    task_usage,
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
from lib.tokenizer import special_tokens
from lib.usage import evaluate_language_model, open_corpus
from lib.weights import find_weights, load_model, load_run, read_weights
from model import value_tables


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
        corpus = open_corpus(name, *args.runs)
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
        row = {"run": path, **steps_and_seed(checkpoint)}
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
            "run's own. Only rows with the same number of steps show what the memory does.")
    write_table(args.out, rows, note, {"note": note, "runs": records})


def table_6(args, device):
    """Count what each fine-tuned model reads in held-out text of its task."""
    rows, records = [], []
    for path in args.runs:
        record = {"run": path, **task_usage(path, device)}
        records.append(record)
        rows.append({**record, **usage_cells(record["layers"])})
    note = ("Best epoch so far. Split: dev if it has about 3 accesses a slot, otherwise train (our "
            "reading). CoLA's dev has fewer accesses than the slots that the paper found in use.")
    write_table(args.out, rows, note, records)


def glue(args):
    """Print Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    rows = score_table(args.runs)
    if not rows:
        raise UserError(f"{', '.join(args.runs)}: no fine-tuned run that is done")
    note = ("Dev splits, median over the seeds of each seed's best epoch; (n): of n seeds. "
            "squad: exact match/F1; mnli: matched/mismatched; cola: Matthews' correlation. "
            "Avg: of the six numbers from mnli to cola, once all are there.")
    write_table(args.out, rows, note, rows)


def by_class(args):
    """Draw Figure 4: how far apart two classes' slots are, before and after fine-tuning."""
    device, _ = use_device(args.device, "float32")
    records = []
    for path in args.runs:
        records += compare_classes(path, device)
    note = ("Train split. Whole: the paper's KL (nats) and IOU of top-1 slots; KL over slots that "
            "both classes read (our reading). Between: KL(p || 0.9 q + 0.1 p) and IOU of random "
            "halves of the classes. Floor: of two halves of one class. Accesses: of a half.")
    write_table(args.out, records, note, records, draw_class_distances)


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
            "snapshot counts accesses in the run's held-out sequences (our reading).")
    write_table(args.out, rows, note, records, draw_staleness)


def curves(args):
    """Draw Figure 3: perplexity and top-1 usage against the step, for several runs."""
    runs, rows = {}, []
    for path in args.runs:
        runs[path] = Run(path).evaluations()
        last = runs[path][-1]
        rows.append({"run": path, "steps": last["step"], "ppl": last["perplexity"],
                     **usage_cells(last["layers"])})
    note = "Held-out text of each run's corpus. The steps of the initial model count."
    write_table(args.out, rows, note, runs, draw_curves)


def slots(args):
    """Show the most read slots of a layer, with contexts."""
    model, _, corpus = open_model(args.run, args.data, args.device)
    layers = value_tables(model)
    if args.layer not in layers:
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{list(layers)}")
    read, top1 = corpus.counts[args.layer]["read"], corpus.counts[args.layer]["top1"]
    rows, records = [], []
    for slot in np.argsort(-read, kind="stable")[:args.most].tolist():
        facts = {"slot": slot, "reads": int(read[slot]), "top1": int(top1[slot])}
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
    model, tokenizer, corpus = open_model(args.run, args.data, args.device)
    special = special_tokens(tokenizer.get_vocab())
    ids = tokenizer.encode(args.text.replace("[MASK]", special.mask)).ids
    positions = np.flatnonzero(np.equal(ids, tokenizer.token_to_id(special.mask)))
    if not len(positions):
        raise UserError(f"no [MASK] in {args.text!r}: write one where a word is to be guessed")
    for position in positions:
        print(f"[MASK] at token {position}:")
        print_guess(model, tokenizer, ids, position, corpus, args.contexts)


def sample(args):
    """Continue a text with a causal language model."""
    check_language_model(args.run, causal=True)
    device, _ = use_device(args.device, "float32")
    model, tokenizer = load_run(args.run)
    start = special_tokens(tokenizer.get_vocab()).sep  # a document begins
    ids = tokenizer.encode(start + args.text, add_special_tokens=False).ids
    window, _ = training_text(args.run)
    generator = torch.Generator().manual_seed(args.seed)
    ids = model.to(device).generate(ids, args.tokens, window, args.temperature, args.top_k,
                                    generator)
    print(tokenizer.decode(ids[1:], skip_special_tokens=False))


def browse(args):
    """Write an HTML page of what slots know: usage, contexts, a search for tokens."""
    _, _, corpus = open_model(args.run, args.data, args.device)
    if not corpus:
        raise UserError(f"{args.run}: a model without memory has no slots")
    note = f"What {corpus.ids.size:,} tokens of data/{corpus.name} read, nothing masked"
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

    runs, device, reader = (Parser(add_help=False) for _ in range(3))  # of several commands
    runs.add_argument("runs", nargs="+", metavar="out/RUN")
    runs.add_argument("--out", metavar="NAME", help="write NAME.md and NAME.json")
    device.add_argument("--device", default="auto", help="auto, cuda, mps or cpu")
    reader.add_argument("run", help="out/RUN, or one of its checkpoints")
    reader.add_argument("--data", metavar="NAME", help="data/NAME, not the run's corpus")
    reader.add_argument("--contexts", type=int, default=5, help="of a slot (5)")

    option = begin(table, runs, device)
    option("--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it (Table 2)")

    begin(glue, runs)

    begin(by_class, runs, device)
    begin(staleness, runs)
    begin(curves, runs)

    option = begin(slots, reader, device)
    option("--layer", type=int, required=True, help="counted from 1")
    option("--most", type=int, default=10, help="how many slots (10)")
    option("--out", metavar="NAME", help="write NAME.md and NAME.json")

    option = begin(fill, reader, device)
    option("text", help="a text with [MASK] in it, in quotes")

    option = begin(sample, device)
    option("run", help="out/RUN, or one of its checkpoints")
    option("text", help="the prompt, or '' for none; [SEP] ends a document")
    option("--tokens", type=int, default=40, help="to add (40)")
    option("--temperature", type=float, default=0.8, help="0: the likeliest token (0.8)")
    option("--top_k", type=int, default=50, help="draw from so many likeliest tokens (50)")
    option("--seed", type=int, default=0, help="of the draws (0)")

    option = begin(browse, reader, device)
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
