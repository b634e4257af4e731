"""
Measure trained models: the memory tables and figures of Kim & Jung (2020).

$ python measure.py table out/demo_more out/demo_resm_init --data docs --out results/table2
$ python measure.py staleness out/demo_pkm out/demo_resm_init --out results/figure2
$ python measure.py curves out/demo_more out/demo_resm_init --out results/figure3
$ python measure.py slots out/demo_resm_init --layer 2           # what reads its most read slots
$ python measure.py fill out/demo_resm_init "Return a new [MASK] of the given shape."
$ python measure.py sample out/demo_causal_memory "Returns a new"   # a causal language model
$ python measure.py browse out/demo_resm_init --out memory      # memory.html: what a slot knows
$ python measure.py predict out/base_sst2 new.tsv --out said     # a fine-tuned run on new text
$ python measure.py glue out/base_sst2 out/base_resm_init_sst2  # Tables 4, 5, 7: fine-tuned runs
$ python measure.py table out/base_resm_init_sst2               # Table 6
$ python measure.py by_class out/base_pkm_sst2 out/base_resm_init_sst2 --out results/figure4

--out NAME writes a table to NAME.md and NAME.json, a figure to NAME.png and NAME.svg. For browse it
writes NAME.html, for predict NAME.tsv, for prune a run; there --curve NAME writes the table.
"""
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lib.browse import page_data, page_html
from lib.device import choose_device
from lib.distributed import is_distributed, run_ranks
from lib.errors import UserError, need
from lib.figures import (
    USAGE,
    class_table,
    curves_table,
    draw_class_distances,
    draw_curves,
    draw_staleness,
    perplexity_cell,
    run_names,
    staleness_table,
    usage_cells,
    write_table,
)
from lib.files import write_text
from lib.predict import predict_file
from lib.run import Run
from lib.settings import DTYPES, Parser, whole_number
from lib.tasks import score_table, tsv_text
from lib.tokenizer import load_tokenizer, special_ids, special_tokens
from lib.usage import (
    CorpusReads,
    check_language_model,
    comparable_evaluations,
    compare_classes,
    evaluate_runs,
    print_guess,
    slot_staleness,
    task_usage,
    times_read,
    training_text,
)
from lib.weights import find_weights, load_model
from model import value_tables


def table(args):
    """Print Table 2 (perplexity and slot usage, with --data) or 6 (usage of fine-tuned runs)."""
    (table_2 if args.data else table_6)(args)


def table_2(args):
    """Evaluate language models on test splits, with the same batches for all."""
    device, dtype, line = choose_device(args.device, args.dtype)
    print(line)
    args.data = list(dict.fromkeys(args.data))  # each once
    seq_len, runs = evaluate_runs(args.runs, args.data, device, dtype, args.batch_size,
                                  args.sequences, args.repeats)
    rows = []
    for run in runs:
        results = list(run["results"].values())
        rows.append([run["run"], run["steps"], run["seed"], *map(perplexity_cell, results),
                     *usage_cells([result["layers"] for result in results[0]])])
    note = (f"Test splits, {args.sequences or 'all'} sequences of {seq_len}. Sequences of a "
            "causal model overlap by half, and its usage counts a token in both. Usage on "
            f"data/{args.data[0]}. Several maskings: mean [lowest, highest]. Steps: those of the "
            "initial model + the run's own. Only rows with the same number of steps show what the "
            "memory does. Each is one run of one seed, and another seed alone changes the "
            "perplexity: run several before you trust a small difference."
            f"")
    header = ["run", "steps", "seed", *(f"{name} ppl" for name in args.data), *USAGE]
    write_table(args.out, header, rows, note, {"note": note, "runs": runs})


def table_6(args):
    """Count what each fine-tuned model reads in the training examples of its task."""
    device = open_device(args)
    records = [task_usage(path, args.sequences, device) for path in args.runs]
    rows = [[r["run"], r["task"], f"{r['examples']:,}", *usage_cells([r["layers"]])]
            for r in records]
    write_table(args.out, ["run", "task", "examples", *USAGE], rows,
                       "The best epoch so far, train split, nothing masked, padding not counted."
                       "", records)


def glue(args):
    """Print Tables 4, 5 and 7: dev scores of fine-tuned runs, medians over their seeds."""
    header, rows, records = score_table(args.runs)
    write_table(args.out, header, rows,
                       "Dev splits, median over the seeds of each seed's best epoch; -: not run. "
                       "Avg: of the six columns from MNLI-m to CoLA, once all are there.", records)


def by_class(args):
    """Draw Figure 4: how far apart two classes' slots are, before and after fine-tuning."""
    names = run_names(args.runs, args.names)
    device = open_device(args)
    records = [record for path in args.runs
               for record in compare_classes(path, args.sequences, device)]
    write_table(args.out, *class_table(records), records,
                       lambda data: draw_class_distances(data, names))


def staleness(args):
    """Draw Figure 2: how many slots were last top-1 at which usage snapshot of a run."""
    names = run_names(args.runs, args.names)
    records = [record for path in args.runs for record in slot_staleness(path)]
    write_table(args.out, *staleness_table(records), records,
                       lambda data: draw_staleness(data, names))


def curves(args):
    """Draw Figure 3: perplexity and top-1 usage against the step, for several runs."""
    names = run_names(args.runs, args.names)
    corpus, runs = comparable_evaluations(args.runs)
    write_table(args.out, *curves_table(runs, corpus), runs,
                       lambda data: draw_curves(data, names))


def slots(args):
    """Show the most read slots of a layer, or given ones, with contexts."""
    checkpoint, corpus = read_corpus(args)
    if args.layer not in corpus.layers:
        raise UserError(f"{args.run}: no memory in layer {args.layer}; its memory layers: "
                        f"{', '.join(map(str, corpus.layers))}")
    (reads, _), n_slots = corpus.layers[args.layer], corpus.n_slots[args.layer]
    if bad := [slot for slot in args.slot if not 0 <= slot < n_slots]:
        raise UserError(f"slot {bad[0]}: layer {args.layer} has slots 0 to {n_slots - 1}")
    read, top1 = times_read(reads, n_slots)
    records = [{"slot": slot, "reads": int(read[slot]), "top1": int(top1[slot]),
                "contexts": corpus.contexts(args.layer, slot, args.contexts)}
               for slot in args.slot or np.argsort(-read, kind="stable")[:args.most].tolist()]
    rows = [[r["slot"], r["reads"], r["top1"], *context] for r in records
            for context in r["contexts"] or [(0.0, "(never read)")]]
    note = (f"Layer {args.layer} of {checkpoint}; {len(reads):,} tokens of data/{corpus.name} x "
            f"{reads.shape[1]} heads; weights are summed over the heads.")
    header = "slot", "reads", "top-1", "weight", "context"
    write_table(args.out, header, rows, note, records)


def browse(args):
    """Write an HTML page of what slots know: usage, contexts, a search for words."""
    checkpoint, corpus = read_corpus(args)
    snapshots = {}
    if any(Path(args.run, "usage").glob("step_*.npz")):  # a folder of weights has none
        snapshots = Run(args.run).usage_snapshots()
    data = page_data(corpus, snapshots, args.contexts)
    note = (f"{checkpoint.name}: what {corpus.ids.size:,} tokens of data/{corpus.name}'s test text "
            "read, nothing masked")
    file = Path(f"{args.out}.html")
    write_text(file, page_html({"title": args.run, "note": note, **data}))
    print(f"wrote {file}, {file.stat().st_size / 1e6:.1f} MB: open it in a browser")


def fill(args):
    """Guess each [MASK]; show the slots read there, and what else reads those."""
    model, tokenizer, checkpoint, corpus = open_language_model(args, causal=False)
    special, mask_id = special_tokens(tokenizer.get_vocab()), special_ids(tokenizer).mask
    for text in args.texts:
        masked = text.replace("[MASK]", special.mask)
        ids = tokenizer.encode(special.cls + masked + special.sep).ids
        if mask_id not in ids:
            raise UserError(f"no [MASK] in {text!r}: write one where a word is to be guessed")
        print(f"{checkpoint}: {text}")
        for position in [n for n, token in enumerate(ids) if token == mask_id]:
            print(f"[MASK] at token {position}:")
            print_guess(model, tokenizer, ids, position, corpus, args.contexts)


def sample(args):
    """Continue a text; show first the likeliest next tokens and the slots read for them."""
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature {args.temperature}: expected a number, 0 or more")
    model, tokenizer, checkpoint, corpus = open_language_model(args, causal=True)
    start = special_tokens(tokenizer.get_vocab()).sep  # a document begins
    ids, window = tokenizer.encode(start + args.text).ids, training_text(args.run)[0]
    seen = ids[-window:]
    print(f"{checkpoint}: {args.text}\nnext:")
    print_guess(model, tokenizer, seen, len(seen) - 1, corpus, args.contexts)
    generator = torch.Generator().manual_seed(args.seed)
    for number in range(1, args.samples + 1):
        new = model.generate(ids, args.tokens, window, args.temperature, args.top_k, generator)
        print(f"sample {number}: {tokenizer.decode(new[1:], skip_special_tokens=False)}")


def predict(args):
    """Predict for new texts with a fine-tuned model; print or write a TSV table."""
    device, _, _ = choose_device(args.device, "float32")  # the table is alone on stdout
    file, out = Path("/dev/stdin" if args.file == "-" else args.file), Path(f"{args.out}.tsv")
    if args.out and out.resolve() == file.resolve():
        raise UserError(f"--out {args.out}: it would replace {file}: name a new table")
    header, rows = predict_file(args.run, file, device)
    text = tsv_text([header, *rows])
    if args.out:
        write_text(out, text)
        text = f"wrote {out}: {len(rows):,} rows\n"
    print(text, end="")


def open_device(args):
    """Choose the device of --device and print it."""
    device, _, line = choose_device(args.device, "float32")
    print(line)
    return device


def read_corpus(args):
    """Read a corpus with the model of args.run: (folder of its weights, CorpusReads)."""
    checkpoint, _ = find_weights(args.run)
    model = load_model(checkpoint).eval().to(open_device(args))
    return checkpoint, CorpusReads(model, args.run, args.data, args.sequences)


def open_language_model(args, causal):
    """Load the language model of args.run: (model, tokenizer, folder of its weights, CorpusReads).
    The last is None for a model without memory, or if the run's corpus is not there."""
    check_language_model(args.run, causal)
    checkpoint, vocab = find_weights(args.run)
    model, corpus = load_model(checkpoint).eval().to(open_device(args)), None
    try:
        if value_tables(model):
            corpus = CorpusReads(model, args.run, args.data, args.sequences)
    except UserError as error:
        if args.data:
            raise
        print(f"what else reads the slots is not shown: {error}")
    return model, load_tokenizer(vocab), checkpoint, corpus


def main(argv=None):
    parser = Parser(description=__doc__)
    option = parser.commands(table, glue, by_class, staleness, curves, slots, fill, sample,
                             browse, predict)
    number = {"type": whole_number, "metavar": "N"}
    readers = "slots fill sample browse"  # commands that read a corpus with one model
    option("table glue by_class staleness curves", "runs", nargs="+", metavar="out/RUN")
    option(f"{readers} predict", "run", metavar="RUN", help="out/<run>, a seed or a checkpoint")
    option("by_class staleness curves", "--names", nargs="+", help="of runs, in the figure")
    option("predict", "file", metavar="FILE", help="TSV with a header, SQuAD's JSON, or - (stdin)")
    option("fill", "texts", nargs="+", metavar="TEXT", help="a text with [MASK] in it, in quotes")
    option("sample", "text", help="the prompt, or '' for none; [SEP] ends a document")
    option("sample", "--tokens", **number, default=40, help="to add (40)")
    option("sample", "--samples", **number, default=1, help="(1)")
    option("sample", "--temperature", type=float, default=0.8, help="0: the likeliest token (0.8)")
    option("sample", "--top_k", **number, default=50, help="draw from the N likeliest (50)")
    option("sample", "--seed", type=partial(whole_number, least=0), default=0, help="(0)")
    option("table", "--data", nargs="+", metavar="NAME", help="data/NAME: perplexity on it")
    option(f"{readers}", "--data", metavar="NAME", help="data/NAME, not the run's corpus")
    option("table by_class", "--sequences", **number, help="a quick look at N, spread evenly")
    option(readers, "--sequences", **number, default=512, help="of its test text (512)")
    option("table", "--repeats", **number, default=1, help="maskings (1)")
    option("table", "--batch_size", **number, default=8, help="sequences (8)")
    option("slots", "--layer", type=int, required=True, help="counted from 1")
    option("slots", "--slot", type=int, nargs="+", default=[], metavar="N", help="these slots")
    option("slots", "--most", **number, default=10, help="or the N most read (10)")
    option("slots fill sample", "--contexts", **number, default=3, help="for a slot (3)")
    option("browse", "--contexts", **number, default=8, help="for a slot (8)")
    option(f"table by_class {readers} predict", "--device", default="auto",
           help="cuda, mps, cpu")
    option("table", "--dtype", choices=DTYPES, default="float32", help="(float32)")
    out = {"metavar": "NAME",
           "type": lambda name: re.sub(r"(\.(md|json|png|svg|html|tsv))?/*$", "", name)}
    option("table glue by_class staleness curves slots predict", "--out", **out,
           help="write NAME.md, NAME.json, ...; predict: NAME.tsv")
    option("browse", "--out", **out, required=True, help="write NAME.html")
    args = parser.parse_args(argv)
    if args.command == "by_class" and args.out:
        need("matplotlib", "a figure")  # which is drawn after long work
    if is_distributed() and args.command != "table":
        raise UserError(f"{args.command}: one process does it: python measure.py; torchrun is for "
                        "table")
    args.call(args)


if __name__ == "__main__":
    run_ranks(main)
