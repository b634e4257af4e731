"""
Print the table of results/changes.md and a verdict on each change.

$ python results/changes_verdicts.py                # from the published logs
$ python results/changes_verdicts.py out/changes    # from your own runs of results/changes.sh

From the published logs it also draws the page's two pictures.
"""
import math
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
from changes import WIDER
from verdicts import (
    last_perplexity,
    minus,
    open_logs,
    percent_below,
    standard_error,
    train_seconds,
    verdict,
)

from lib.common.errors import UserError, run_main
from lib.common.files import read_json
from lib.common.progress import markdown
from lib.slot_usage.figures import COLORS, INK, MARKERS, subplots

FOLDER = Path(__file__).parent / "changes"
SEEDS = 0, 10, 20
MORE_SEEDS = *SEEDS, 30, 40  # of the systems below
JOINED = "b", "f", "zero_values", "zero_topk_16", "zero_slow_topk_16"
RATES = "2e-4", "5e-4", "1e-3"
TEXTS = "natural", "natural_docs", "natural_wikitext2"
NAMES = {"b": "(b), without memory", "b_2000": "(b), 2,000 steps", "wide_ffn": "(b), wider FFNs",
         "f": "(f)", "decayed_values": "rate of the values decays", "zero_values": "values from 0",
         "silu_gate": "gate: silu(x W)", "learned_beta": "beta learned, from 0",
         "qk_norm": "cosine scores", "layer_norm": "layer norm of queries",
         "slow_search": "sub-keys, query at 0.1", "keys_lr": "sub-keys at 0.1",
         "drop_keys": "a tenth of sub-keys dropped", "drop_reads": "a tenth of reads dropped",
         "shared_table": "one table for both layers", "topk_16": "top-16", "topk_32": "top-32",
         "keys_64": "64 x 64 slots", "keys_256": "256 x 256 slots",
         "zero_gate": "values from 0, gate", "zero_topk_16": "values from 0, top-16",
         "zero_slow_topk_16": "these two, sub-keys, query at 0.1",
         "b_3200": "(b), 3,200 steps", "f_3200": "(f), 3,200 steps",
         "zero_values_3200": "values from 0, 3,200 steps"}
LONGER = "b_2000", "b_3200", "f_3200", "zero_values_3200"
WIDTH, D_FF, HEADS, KEY_DIM, N_KEYS, TOPK = 64, 256, 4, 64, 128, 8  # configs/study
STEP_TIMES = {"a CPU": 1.16, "an H100, on paper": 1.76}  # (f) / (b) at base's size: speed.md
COSTS = {  # parameters that a token reads in an FFN and a memory: what stands in the figure
    "b": "(b)", "b_2000": "(b), 2,000 steps", "wide_ffn": "wider FFNs", "f": "(f)",
    "zero_values": "values from 0", "zero_topk_16": "values from 0, top-16", "topk_16": "top-16",
    "topk_32": "top-32", "keys_64": "64 x 64", "keys_256": "256 x 256"}


def read_runs(folder, system, seeds=SEEDS):
    """Read the finished runs of a system: {seed: its results on test texts, and its seconds}."""
    runs = {}
    for seed in seeds:
        run = folder / f"{system}_s{seed}"
        if (run / "test.json").is_file():
            runs[seed] = read_json(run / "test.json") | {"seconds": train_seconds(run)}
    return runs


def below(runs, others, text):
    """Return how far each seed of `runs` ends below `others`, in % of the perplexity."""
    return [percent_below(run[text]["perplexity"], others[seed][text]["perplexity"])
            for seed, run in runs.items()]


def time_ratio(runs, f):
    """Return how long the fastest seed of `runs` trained, as a multiple of (f)'s fastest."""
    return min(run["seconds"] for run in runs.values()) / min(run["seconds"] for run in f.values())


def cell(numbers):
    """Format a mean and its standard error."""
    error = f" ({standard_error(numbers):.2f})" if len(numbers) > 1 else ""
    return f"{mean(numbers):+.2f}{error}"


def top1_usage(runs, text):
    """Format the mean top-1 MU of all seeds and memory layers in %: "" without memory."""
    usages = [layer["top1_mu"] for run in runs.values() for layer in run[text]["layers"].values()]
    return f"{100 * mean(usages):.1f}" if usages else ""


def row(name, runs, f):
    """Return a system's row of the table: means over its seeds."""
    return [name, len(runs), f"{mean(run[TEXTS[0]]['perplexity'] for run in runs.values()):.2f}",
            *(cell(below(runs, f, text)) for text in TEXTS),
            top1_usage(runs, TEXTS[0]), f"{time_ratio(runs, f):.2f}"]


def draw(systems, f):
    """Draw how far each change ends below (f). A dot is a seed, a line the mean."""
    figure, [[axes]] = subplots(1, 1, 0.23 * len(systems) + 0.9)
    for n, runs in enumerate(reversed(systems.values())):
        differences = below(runs, f, TEXTS[0])
        axes.plot(differences, [n] * len(runs), "o", color=COLORS[1], markersize=4)
        axes.plot([mean(differences)] * 2, [n - 0.35, n + 0.35], "-", color=COLORS[1])
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(systems)), [NAMES[name] for name in reversed(systems)])
    axes.set_xlabel("perplexity below (f), %")
    figure.savefig(FOLDER / "changes.png")


def parameters_read(name):
    """Compute how many parameters of FFN and memory a token reads in a memory layer."""
    ffn = 2 * WIDTH * (D_FF + (WIDER if name == "wide_ffn" else 0))
    if name in ("b", "b_2000", "wide_ffn"):
        return ffn
    n_keys = {"keys_64": 64, "keys_256": 256}.get(name, N_KEYS)
    topk = 16 if name.endswith("topk_16") else 32 if name == "topk_32" else TOPK
    search = HEADS * KEY_DIM * (WIDTH + n_keys)
    return ffn + search + HEADS * topk * WIDTH


def draw_costs(systems, f):
    """Draw the perplexity against a run's time, and against the parameters a token reads."""
    figure, [panels] = subplots(1, 2, 3.2, sharey=True)
    for n, (name, label) in enumerate(COSTS.items()):
        if runs := systems.get(name):
            y = mean(below(runs, f, TEXTS[0]))
            look = {"color": COLORS[n % len(COLORS)], "marker": MARKERS[n % len(MARKERS)]}
            panels[0].plot(time_ratio(runs, f), y, linestyle="none", label=label, **look)
            panels[1].plot(parameters_read(name) / 1000, y, linestyle="none", **look)
    panels[0].set(xlabel="time of the run / (f)", ylabel="perplexity below (f), %", xlim=0)
    panels[1].set(xlabel="parameters read, thousands", xlim=0)
    figure.legend(loc="outside upper center", ncols=3, handlelength=1, fontsize=9)
    figure.savefig(FOLDER / "costs.png")


def print_at_base_size(systems):
    """Print who would win in equal time with the step times of base's size.

    (b) gets more steps. Its gain is that of a power law through 800 and 2,000 steps.
    """
    def ends(name):
        return {seed: run[TEXTS[0]]["perplexity"] for seed, run in systems[name].items()}

    b, later = ends("b"), ends("b_2000")
    for machine, ratio in STEP_TIMES.items():
        power = math.log(ratio) / math.log(2000 / 800)
        for name in ("f", "zero_values"):  # the other winners' steps take longer than (f)'s
            print(f"{NAMES[name]}, % below (b) with {ratio} times the steps ({machine}):", verdict(
                [percent_below(end, b[seed] * (later[seed] / b[seed]) ** power)
                 for seed, end in ends(name).items()]))


def usage_cell(runs, key):
    """Format the mean of a usage metric over seeds and memories: "" without memory."""
    values = [layer[key] for run in runs.values() for layer in run[TEXTS[0]]["layers"].values()]
    return f"{mean(values):.2f}" if values else ""


def stale(runs):
    """Return each seed's share of stale slots in %, the mean over the memories."""
    return [100 * mean(run["stale"].values()) for run in runs.values() if "stale" in run]


def print_more_seeds(folder):
    """Print the joined changes in five seeds: a table and the verdicts on their claims."""
    systems = {name: read_runs(folder, name, MORE_SEEDS) for name in JOINED}
    if any(len(runs) < len(MORE_SEEDS) for runs in systems.values()):
        print(f"(Left out: five seeds, without all runs of {', '.join(JOINED)})")
        return
    b, f, best = (systems[name] for name in ("b", "f", JOINED[-1]))
    header = ["system", *(f"{text}: % below {x}" for x in ("(f)", "(b)") for text in TEXTS),
              "top-1 MU %", "KL_u", "KL_w", "stale %"]
    rows = []
    for name, runs in systems.items():
        differences = [cell(below(runs, others, text)) for others in (f, b) for text in TEXTS]
        rows.append([NAMES[name], *differences, top1_usage(runs, TEXTS[0]),
                     usage_cell(runs, "kl_u"), usage_cell(runs, "kl_w"),
                     f"{mean(stale(runs)):.1f}" if stale(runs) else ""])
    print(markdown(header, rows))
    for other, runs in (("(f)", f), ("(b)", b)):
        for text in TEXTS:
            print(f"all three changes below {other}, %, {text}:", verdict(below(best, runs, text)))
    if len(stale(f)) == len(stale(best)) == len(MORE_SEEDS):
        print("stale slots, (f) - all three changes, points:",
              verdict(minus(stale(f), stale(best))))


def print_all(folder):
    """Print rates, table and verdicts. Returns the runs: {system: {seed: results}}."""
    for rate in RATES:
        if (run := folder / f"lr{rate}_b_s0").is_dir():
            print(f"(b), seed 0, rate {rate}: validation perplexity {last_perplexity(run):.2f}")
    systems = {name: runs for name in NAMES if (runs := read_runs(folder, name))}
    if "f" not in systems:
        raise UserError(f"{folder}: no finished run f_s0 in it; results/changes.sh makes it")
    f = systems["f"]
    header = ["system", "seeds", "ppl", *(f"{text}: % below (f)" for text in TEXTS),
              "top-1 MU %", "time / (f)"]
    rows = []
    for name, runs in systems.items():
        same_steps = systems["f_3200"] if name.endswith("_3200") else f
        rows.append(row(NAMES[name], runs, same_steps))
    print(markdown(header, rows))
    for name, runs in systems.items():
        if name != "f" and len(runs) > 1:
            print(f"{NAMES[name]}, % below (f):", verdict(below(runs, f, TEXTS[0])))
    print_at_base_size(systems)
    print_more_seeds(folder)
    return systems


def main(runs=None):
    with open_logs(FOLDER / "logs.tar.xz", runs) as folder:
        systems = print_all(folder)
    if not runs:
        draw({name: runs for name, runs in systems.items() if name not in ("f", *LONGER)},
             systems["f"])
        draw_costs(systems, systems["f"])


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
