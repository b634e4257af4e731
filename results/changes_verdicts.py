"""
Print the table of results/changes.md with a verdict on each change, and draw its picture.

$ python results/changes_verdicts.py        # from the published logs
$ python results/changes_verdicts.py out    # from your own runs of results/changes.sh
"""
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))
from verdicts import percent_below, verdict

from lib.common.errors import run_main
from lib.common.files import read_json
from lib.common.progress import markdown
from lib.slot_usage.figures import COLORS, INK, subplots

FOLDER = Path(__file__).parent / "changes"
SEEDS = 0, 10, 20
TEXTS = "natural", "natural_docs", "natural_wikitext2"
NAMES = {"b": "(b), without memory", "b_2000": "(b), 2,000 steps", "wide_ffn": "(b), wider FFNs",
         "f": "(f)", "decayed_values": "rate of the values decays", "zero_values": "values from 0",
         "silu_gate": "gate: silu(x W)", "learned_beta": "beta learned, from 0",
         "qk_norm": "cosine scores", "layer_norm": "layer norm of queries",
         "slow_search": "sub-keys, query at 0.1", "keys_lr": "sub-keys at 0.1",
         "drop_keys": "a tenth of sub-keys dropped", "drop_reads": "a tenth of reads dropped",
         "shared_table": "one table for both layers", "topk_16": "top-16", "topk_32": "top-32",
         "keys_64": "64 x 64 slots", "keys_256": "256 x 256 slots"}


def read_runs(folder, system):
    """Read the finished runs of a system: {seed: its results on test texts, and its seconds}."""
    runs = {}
    for seed in SEEDS:
        run = folder / f"{system}_s{seed}"
        if (run / "test.json").is_file():
            records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
            seconds = [record["elapsed"] for record in records if "elapsed" in record][-1]
            runs[seed] = read_json(run / "test.json") | {"seconds": seconds}
    return runs


def below(runs, others, text):
    """Return how far each seed of `runs` ends below `others`, in % of the perplexity."""
    return [percent_below(run[text]["perplexity"], others[seed][text]["perplexity"])
            for seed, run in runs.items()]


def cell(numbers):
    """Format a mean and its standard error."""
    error = f" ({stdev(numbers) / len(numbers)**0.5:.2f})" if len(numbers) > 1 else ""
    return f"{mean(numbers):+.2f}{error}"


def row(name, runs, f):
    """Return a system's row of the table: means over its seeds."""
    layers = [list(run["natural"]["layers"].values()) for run in runs.values()]
    usage = [100 * mean(layer["top1_mu"] for layer in both) for both in layers if both]
    time = mean(run["seconds"] / f[seed]["seconds"] for seed, run in runs.items())
    return [name, len(runs), f"{mean(run['natural']['perplexity'] for run in runs.values()):.2f}",
            *(cell(below(runs, f, text)) for text in TEXTS),
            f"{mean(usage):.1f}" if usage else "", f"{time:.2f}"]


def draw(systems, f):
    """Draw how far each change ends below (f): a dot for each seed, a line for the mean."""
    figure, [[axes]] = subplots(1, 1, 0.23 * len(systems) + 0.9)
    for n, runs in enumerate(reversed(systems.values())):
        differences = below(runs, f, "natural")
        color = COLORS[1] if len(runs) > 1 else INK
        axes.plot(differences, [n] * len(runs), "o", color=color, markersize=4)
        axes.plot([mean(differences)] * 2, [n - 0.35, n + 0.35], "-", color=color)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(systems)), [NAMES.get(name, name) for name in reversed(systems)])
    axes.set_xlabel("perplexity below (f), %")
    figure.savefig(FOLDER / "changes.png")


def print_and_draw(folder):
    names = dict.fromkeys([*NAMES, *sorted(run.name.rpartition("_s")[0]
                                           for run in folder.glob("*_s*"))])
    systems = {name: runs for name in names if (runs := read_runs(folder, name))}
    f = systems["f"]
    header = ["system", "seeds", "ppl", *(f"{text}: % below (f)" for text in TEXTS),
              "top-1 MU %", "time / (f)"]
    print(markdown(header, [row(NAMES.get(name, name), runs, f) for name, runs in systems.items()]))
    for name, runs in systems.items():
        if name != "f" and len(runs) > 1:
            print(f"{NAMES.get(name, name)}, % below (f):", verdict(below(runs, f, "natural")))
    draw({name: runs for name, runs in systems.items() if name not in ("f", "b_2000")}, f)


def main(folder=None):
    """Read the runs in a folder, or the published logs."""
    if folder:
        return print_and_draw(Path(folder))
    with tempfile.TemporaryDirectory() as logs, tarfile.open(FOLDER / "logs.tar.xz") as archive:
        archive.extractall(logs, filter="data")
        print_and_draw(Path(logs) / "changes_logs")


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
