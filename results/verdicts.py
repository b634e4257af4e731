"""
Print the tables of results/study.md and the verdict on each claim.

$ python results/verdicts.py            # from the published tables and logs
$ python results/verdicts.py out        # from your own runs of results/study.sh

Claims 1 to 4 and 6 come from results/study/table2.json, or else from the rounded numbers of
table2.md. Claim 7 needs the usage snapshots of the runs, which are not published. The others come
from the logs. Parts without their files are left out, with a line that says so.
"""
import contextlib
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.common.errors import run_main
from lib.common.files import read_json
from lib.common.progress import markdown
from lib.slot_usage.counts import last_used
from lib.weights.run import Run

STUDY = Path(__file__).parent / "study"
CORPUS = "natural"  # the training text
SEEDS = (0, 10, 20)
SYSTEMS = {"a": "study", "b": "study_more", "c": "study_pkm", "d": "study_resm",
           "e": "study_pkm_init", "f": "study_resm_init", "r": "study_resm_init_ffn"}  # r: ResM'
DRIFT = {"5e-4": "study_resm_init_s0", "5e-4, sub-keys a tenth": "lr5e-4_keys_lr_s0",
         "2e-3": "lr2e-3_resm_init", "2e-3, sub-keys a tenth": "lr2e-3_keys_lr",
         "2e-3, warm-up 2,000": "lr2e-3_warmup", "2e-3, value_lr 1e-3": "lr2e-3_value_lr_low",
         "2e-3, value_lr 1.6e-2": "lr2e-3_value_lr_high", "2e-3, no query norm": "lr2e-3_no_norm"}
DRIFT_STEPS = (64, 800, 1600, 3200)  # columns of the table of drift; the last two show perplexity
FINE_TUNED = {"a": "minilm", "b": "minilm_more", "e": "minilm_pkm_init", "f": "minilm_resm_init"}
MINILM = "all-MiniLM-L6-v2"
SCORES = {"sst2": ("accuracy", 100), "rte": ("accuracy", 100), "squad": ("f1", 1)}  # factor to %


def run_name(system, seed):
    return f"{SYSTEMS[system]}_s{seed}"


def standard_error(numbers):
    return stdev(numbers) / len(numbers) ** 0.5


def mean_with_error(numbers):
    """Format the mean of the seeds, its standard error, and the numbers themselves."""
    error = f"s.e. {standard_error(numbers):.2g}" if len(numbers) > 1 else "one seed"
    return f"{mean(numbers):+.4g} ({error}; {', '.join(f'{x:+.4g}' for x in numbers)})"


def verdict(differences):
    """Format the seeds' differences and the verdict on the claim that they are positive."""
    if abs(mean(differences)) < 2 * standard_error(differences):
        word = "undecided"
    else:
        word = "confirmed" if mean(differences) > 0 else "refuted"
    return f"{mean_with_error(differences)}: {word}"


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def percent_below(lower, higher):
    return 100 * (1 - lower / higher)


def mean_row(system, results):
    """Return a row of means over the seeds; usage has both layers, 2 / 3."""
    runs = [results[run_name(system, seed)] for seed in SEEDS]
    cells = [SYSTEMS[system], " / ".join(f"{run[CORPUS]['perplexity']:.2f}" for run in runs)]
    cells += [f"{mean(run[corpus]['perplexity'] for run in runs):.1f}" for corpus in runs[0]]
    for key, factor, form in (("mu", 100, ".1f"), ("top1_mu", 100, ".1f"), ("kl_u", 1, ".2f"),
                              ("kl_w", 1, ".2f")):
        layers = [[layer[key] for layer in run[CORPUS]["layers"].values()] for run in runs]
        cells.append(" / ".join(f"{factor * mean(of_layer):{form}}"
                                for of_layer in zip(*layers, strict=True)))
    return cells


def read_table():
    """Read {run: {corpus: metrics}} that measure.py table wrote: as JSON, or else as Markdown."""
    if (file := STUDY / "table2.json").is_file():
        return {row["run"].removeprefix("out/"):
                {corpus: metrics for corpus, [metrics] in row["results"].items()}
                for row in read_json(file)["runs"]}
    print("(Claims 1 to 4 and 6 from the rounded numbers of table2.md)")
    lines = (STUDY / "table2.md").read_text().split("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].removeprefix("out/"): read_row(dict(zip(header, row, strict=True)))
            for row in rows}


def read_row(cells):
    """Return {corpus: metrics} of a row of table2.md, whose header are the keys of `cells`."""
    columns = {"mu": ("MU %", 100), "top1_mu": ("top-1 MU %", 100), "kl_u": ("KL_u", 1),
               "kl_w": ("KL_w", 1)}
    layers = cells["layers"].split("/") if cells["layers"] != "-" else []
    usage = {layer: {key: float(cells[title].split("/")[n]) / unit
                     for key, (title, unit) in columns.items()} for n, layer in enumerate(layers)}
    return {title.removesuffix(" ppl"): {"perplexity": float(cell), "layers": usage}
            for title, cell in cells.items() if title.endswith(" ppl")}


def print_test_results():
    """Print the means on the test splits, and claims 1 to 4 and 6."""
    results = read_table()

    def top1_usage(system, seed):
        """Return the mean top-1 MU of the memory layers, in %."""
        layers = results[run_name(system, seed)][CORPUS]["layers"].values()
        return 100 * mean(layer["top1_mu"] for layer in layers)

    def ends_below(better, worse, corpus=CORPUS):
        """Judge whether `better` ends below `worse`, in % of the perplexity of `worse`."""
        return verdict([percent_below(results[run_name(better, seed)][corpus]["perplexity"],
                                      results[run_name(worse, seed)][corpus]["perplexity"])
                        for seed in SEEDS])

    corpora = list(results[run_name("a", 0)])
    header = ["run", "seeds 0 / 10 / 20", *(f"{corpus} ppl" for corpus in corpora),
              "MU %", "top-1 MU %", "KL_u", "KL_w"]
    print(markdown(header, [mean_row(system, results) for system in SYSTEMS]))
    print("Differences are means over the seeds (standard error; each seed).")
    print("flat: perplexity of (b), 20% more steps, below (a), %:", ends_below("b", "a"))
    for corpus in corpora:
        print(f"1. perplexity of (f) below (b), %, {corpus}: {ends_below('f', 'b', corpus)}")
        print(f"2. perplexity of (f) below (e), %, {corpus}: {ends_below('f', 'e', corpus)}")
    print("3. top-1 MU, lower of (e), (f) - higher of (c), (d), points:", verdict(
        [min(top1_usage("e", seed), top1_usage("f", seed))
         - max(top1_usage("c", seed), top1_usage("d", seed)) for seed in SEEDS]))
    print("4. top-1 MU, (f) - (e), points:",
          verdict([top1_usage("f", seed) - top1_usage("e", seed) for seed in SEEDS]))
    print("6. perplexity of ResM' below (e), %:", ends_below("r", "e"))
    print("6. perplexity of (f) below ResM', %:", ends_below("f", "r"))


def read_evaluations(run):
    """Return {step: record} of the evaluations in the log of a run."""
    return {record["step"]: record for record in Run(run).records() if "perplexity" in record}


def last_perplexity(run):
    evaluations = read_evaluations(run)
    return evaluations[max(evaluations)]["perplexity"]


def print_starts(runs):
    """Print claim 5: the perplexity at step 0 over the last one of the initial model."""
    for system, name in (("f", "(f)"), ("e", "(e)"), ("r", "ResM'")):
        ratios = [read_evaluations(runs / run_name(system, seed))[0]["perplexity"]
                  / last_perplexity(runs / run_name("a", seed)) for seed in SEEDS]
        print(f"5. perplexity of {name} at step 0 / initial model's:",
              *(f"{ratio:.4f}" for ratio in ratios))


def stale_slots(run):
    """Return {layer: share of slots that were top-1 in no snapshot of the second half}."""
    snapshots = run.usage_snapshots()
    return {layer: float((last_used(snapshots, layer) <= len(snapshots) // 2).mean())
            for layer in run.settings(["memory_layers"])["memory_layers"]}


def print_staleness(runs):
    """Print claim 7: stale slots, (c) - (f)."""
    def stale(system, seed):
        return 100 * mean(stale_slots(Run(runs / run_name(system, seed))).values())

    print("7. stale slots, (c) - (f), points:",
          verdict([stale("c", seed) - stale("f", seed) for seed in SEEDS]))


def print_drift(runs):
    """Print why slots fall out of use: (f) under several settings, on the validation split."""
    def top1_usages(evaluation):
        return [100 * layer["top1_mu"] for layer in evaluation["layers"].values()]

    rows = []
    for name, run in DRIFT.items():
        evaluations = [read_evaluations(runs / run).get(step) for step in DRIFT_STEPS]
        rows.append([name, *("/".join(f"{usage:.0f}" for usage in top1_usages(evaluation))
                             if evaluation else "-" for evaluation in evaluations),
                     *(f"{evaluation['perplexity']:.2f}" if evaluation else "-"
                       for evaluation in evaluations[2:])])
    header = ["rate", *(f"top-1 MU % at {step:,}" for step in DRIFT_STEPS),
              *(f"ppl at {step:,}" for step in DRIFT_STEPS[2:])]
    print("Layers 2/3 of (f), seed 0, validation split:")
    print(markdown(header, rows))

    def ends(names):
        return [read_evaluations(runs / name)[DRIFT_STEPS[-1]] for name in names]

    slower = ends(f"lr5e-4_keys_lr_s{seed}" for seed in SEEDS)
    f, b = (ends(run_name(system, seed) for seed in SEEDS) for system in "fb")
    print("Slower sub-keys at 5e-4, top-1 MU above (f), points:", verdict(
        minus([mean(top1_usages(end)) for end in slower], [mean(top1_usages(end)) for end in f])))
    for name, others in (("(f)", f), ("(b)", b)):
        print(f"Slower sub-keys at 5e-4, perplexity below {name}, %:", verdict(
            [percent_below(end["perplexity"], other["perplexity"])
             for end, other in zip(slower, others, strict=True)]))


def read_scores(runs, name):
    """Return {seed: results} of a fine-tuned run or of trainer.py; {} if there is none."""
    for path in (runs / name / "eval_results.json", runs / f"{name}.json"):
        if path.is_file():
            return read_json(path)["seeds"]
    return {}


def print_fine_tuned(runs):
    """Print claims 8 and 9, by the scores of each seed's best epoch."""
    for task, (metric, factor) in SCORES.items():
        scores = {}
        for system, run in FINE_TUNED.items():
            for name, suffix in ((system, ""), (f"{system} frozen", "_fixed")):
                if results := read_scores(runs, f"{run}_{task}{suffix}"):
                    scores[name] = [factor * result[f"eval_{metric}"]
                                    for result in results.values()]
                    print(f"{task}, {metric}, ({name}):", *(f"{x:.2f}" for x in scores[name]))
        for claim, better, worse in ((8, "f", "b"), (9, "e", "e frozen"), (9, "f", "f frozen")):
            if len(scores.get(better, [])) == len(scores.get(worse, [])) > 1:
                print(f"{claim}. {task}, ({better}) - ({worse}), points:",
                      verdict(minus(scores[better], scores[worse])))


def train_seconds(run):
    """Return how long a run trained, without its evaluations."""
    return [record["elapsed"] for record in Run(run).records() if "elapsed" in record][-1]


def print_against_trainer(runs):
    """Print the scores after the last epoch and the seconds, of finetune.py and of Trainer."""
    for task, (metric, factor) in SCORES.items():
        ours = read_scores(runs, f"{MINILM}_{task}")
        theirs = read_scores(runs, f"{MINILM}_{task}_trainer")
        if seeds := [seed for seed in ours if seed in theirs]:
            our_scores = [factor * ours[seed][f"last_{metric}"] for seed in seeds]
            their_scores = [factor * theirs[seed][metric] for seed in seeds]
            seconds = [train_seconds(runs / f"{MINILM}_{task}" / f"seed{seed}") for seed in seeds]
            print(f"{task}, {metric}, finetune.py:", *(f"{x:.2f}" for x in our_scores),
                  "Trainer:", *(f"{x:.2f}" for x in their_scores))
            print(f"{task}, finetune.py - Trainer, points:",
                  mean_with_error(minus(our_scores, their_scores)))
            print(f"{task}, seconds of training, finetune.py:", *(f"{s:.0f}" for s in seconds),
                  "Trainer:", *(f"{theirs[seed]['seconds']:.0f}" for seed in seeds))


def print_all(runs):
    """Print what the files of the runs in a folder tell."""
    for print_part, needed, purpose in (
            (print_starts, run_name("r", SEEDS[-1]), "claim 5"),
            (print_staleness, f"{run_name('f', SEEDS[-1])}/usage", "claim 7"),
            (print_drift, f"lr5e-4_keys_lr_s{SEEDS[-1]}", "the drift")):
        if (runs / needed).is_dir():
            print_part(runs)
        else:
            print(f"(Left out: {purpose}, without the folder {needed})")
    print_fine_tuned(runs)
    print_against_trainer(runs)


@contextlib.contextmanager
def open_logs(archive, runs=None):
    """Give the folder `runs`, or without it the folder in an archive of published logs."""
    if runs:
        yield Path(runs)
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as logs:
        logs.extractall(folder, filter="data")
        yield next(Path(folder).iterdir())


def main(runs=None):
    print_test_results()
    with open_logs(STUDY / "logs.tar.xz", runs) as folder:
        print_all(folder)


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
