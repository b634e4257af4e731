"""
Print the table of results/minilm.md and the verdict on each of its claims.

$ python results/minilm_verdicts.py                 # from the published logs
$ python results/minilm_verdicts.py out/minilm_2    # from your own runs of results/minilm.sh
"""
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
from changes_verdicts import below, read_runs, time_ratio, top1_usage
from verdicts import (
    minus,
    open_logs,
    read_evaluations,
    read_scores,
    verdict,
)

from lib.common.errors import run_main
from lib.common.files import read_json
from lib.common.progress import markdown

SEEDS = 1, 2, 3
RATES = "1e-5", "3e-5", "1e-4"
TEXTS = "natural_bert", "bert_docs", "bert_wikitext2"
STARTS = {"head": "head trained alone", "base": "(a)"}
NAMES = {"b": "(b) trained on", "e": "(e) +Init +PKM", "f": "(f) +Init +ResM",
         "f_zero": "(f), values from 0"}
CHECK = {"b_1e-4": "(b) at 1e-4", "f_1e-4": "(f) at 1e-4"}
CLAIMS = (1, "f", "b"), (2, "f_zero", "f"), (3, "f", "e"), ("-", "f_zero", "b")


def accuracies(folder, name, key="last_accuracy"):
    """Return the accuracy of each fine-tuned seed in %, [] without the run."""
    return [100 * scores[key] for scores in read_scores(folder, name).values()]


def print_rates(folder):
    """Print the validation perplexities while the head, (a), and (b) at each rate train."""
    for name in ("head", "head_1e-4", "head_3e-4", "base", *(f"rate_{rate}" for rate in RATES)):
        if (run := folder / name).is_dir():
            print(f"{name}:", *(f"{step}: {evaluation['perplexity']:.1f}"
                                for step, evaluation in read_evaluations(run).items()))


def print_pretraining(folder):
    """Print the test perplexities, and claims 1 to 3."""
    titles = NAMES | CHECK
    systems = {name: runs for name in titles if (runs := read_runs(folder, name, SEEDS))}
    rows = []
    for name, title in STARTS.items():
        if (path := folder / name / "test.json").is_file():
            results = read_json(path)
            rows.append([title, 1, *(f"{results[text]['perplexity']:.1f}" for text in TEXTS),
                         "", ""])
    for name, runs in systems.items():
        rows.append([titles[name], len(runs), *(
            f"{mean(run[text]['perplexity'] for run in runs.values()):.2f}" for text in TEXTS),
            top1_usage(runs, TEXTS[0]), f"{time_ratio(runs, systems['b']):.2f}"])
    print(markdown(["system", "seeds", *(f"{text} ppl" for text in TEXTS), "top-1 MU %",
                    "time / (b)"], rows))
    for claim, better, worse in CLAIMS:
        if systems.get(better, {}).keys() == systems.get(worse, {}).keys() == set(SEEDS):
            for text in TEXTS:
                print(f"{claim}. {NAMES[better]} below {NAMES[worse]}, %, {text}:",
                      verdict(below(systems[better], systems[worse], text)))


def print_task(folder, task):
    """Print the accuracies on a task, and how (f) compares with (b) on it.

    Returns the accuracies of MiniLM's own weights, and {system: one mean for each seed}.
    """
    suffix = task.lower().replace("-", "")
    own = accuracies(folder, f"own_{suffix}")
    scores = {name: [accuracies(folder, f"{name}_s{seed}_{suffix}") for seed in SEEDS]
              for name in NAMES}
    scores = {name: [mean(seeds) for seeds in runs] for name, runs in scores.items() if all(runs)}
    starts = ((title, accuracies(folder, f"{name}_{suffix}")) for name, title in STARTS.items())
    for name, numbers in (("MiniLM's own weights", own), *starts,
                          *((NAMES[name], runs) for name, runs in scores.items())):
        if numbers:
            print(f"{task}, {name}:", f"{mean(numbers):.2f};", *(f"{x:.2f}" for x in numbers))
    fifth = 5 if task == "SST-2" else "-"
    for claim, better, worse in ((fifth, "f", "b"), ("-", "f_zero", "b"), ("-", "f_zero", "f")):
        if better in scores and worse in scores:
            print(f"{claim}. {task}, {NAMES[better]} - {NAMES[worse]}, points:",
                  verdict(minus(scores[better], scores[worse])))
    return own, scores


def print_fine_tuning(folder):
    """Print the accuracies, and claims 4 to 6."""
    own, scores = print_task(folder, "SST-2")
    if theirs := accuracies(folder, "trainer_sst2", "accuracy"):
        print("SST-2, Trainer:", f"{mean(theirs):.2f};", *(f"{x:.2f}" for x in theirs))
    if own and "b" in scores:
        print("4. (b) above the own weights minus 1, points:",
              verdict([score - mean(own) + 1 for score in scores["b"]]))
    if own and len(own) == len(theirs):
        print("6. SST-2, finetune.py - Trainer, points:", verdict(minus(own, theirs)))
    print_task(folder, "RTE")


def main(runs=None):
    with open_logs(Path(__file__).parent / "minilm/logs.tar.xz", runs) as folder:
        print_rates(folder)
        print_pretraining(folder)
        print_fine_tuning(folder)


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
