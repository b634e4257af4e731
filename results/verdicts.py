"""
The tables of results/study.md and its verdicts on the claims, from the runs of results/study.sh.
The small runs: claims 1 to 7 and drift. The fine-tuned ones: claims 8, 9 and the comparison with
Trainer. What has not been run is left out.

$ PYTHONPATH=. python results/verdicts.py
"""
import json
from pathlib import Path
from statistics import mean, stdev

from lib.common.errors import run_main
from lib.common.files import read_json
from lib.common.progress import markdown
from lib.slot_usage.counts import last_used
from lib.training.run import read_evaluations, read_usage

TABLE = "results/study/table2.json"
CORPUS = "natural"  # that the systems were trained on
SEEDS = (0, 10, 20)
SYSTEMS = {"a": "study", "b": "study_more", "c": "study_pkm", "d": "study_resm",
           "e": "study_pkm_init", "f": "study_resm_init", "r": "study_resm_init_ffn"}  # r: ResM'
DRIFT = {"5e-4": "study_resm_init_s0", "5e-4, sub-keys a tenth": "lr5e-4_keys_lr_s0",
         "2e-3": "lr2e-3_resm_init", "2e-3, sub-keys a tenth": "lr2e-3_keys_lr",
         "2e-3, warm-up 2,000": "lr2e-3_warmup", "2e-3, value_lr 1e-3": "lr2e-3_value_lr_low",
         "2e-3, value_lr 1.6e-2": "lr2e-3_value_lr_high", "2e-3, no query norm": "lr2e-3_no_norm"}
FINE_TUNED = {"a": "minilm", "b": "minilm_more", "e": "minilm_pkm_init", "f": "minilm_resm_init"}
PEER = "all-MiniLM-L6-v2"
SCORES = {"sst2": ("accuracy", 100), "rte": ("accuracy", 100), "squad": ("f1", 1)}  # and its factor
STEPS = (64, 800, 1600, 3200)  # at which drift() looks


def run(system, seed):
    return f"out/{SYSTEMS[system]}_s{seed}"


def with_error(d):
    """A mean, its standard error and what it is of."""
    error = f"s.e. {stdev(d) / len(d) ** 0.5:.2g}" if len(d) > 1 else "one seed"
    return f"{mean(d):+.4g} ({error}; {', '.join(f'{x:+.4g}' for x in d)})"


def difference(d):
    """A mean with its standard error, and what it says of the claim that it is above 0."""
    m, error = mean(d), stdev(d) / len(d) ** 0.5
    verdict = "undecided" if abs(m) < 2 * error else "confirmed" if m > 0 else "refuted"
    return f"{with_error(d)}: {verdict}"


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def percent_below(good, bad):
    return 100 * (1 - good / bad)


def mean_row(system, results):
    """A row of the table of means over the seeds; usage is that of layers 2 and 3."""
    runs = [results[run(system, seed)] for seed in SEEDS]
    cells = [SYSTEMS[system], " / ".join(f"{one[CORPUS]['perplexity']:.2f}" for one in runs)]
    cells += [f"{mean(one[name]['perplexity'] for one in runs):.1f}" for name in runs[0]]
    for key, factor, form in (("mu", 100, ".1f"), ("top1_mu", 100, ".1f"), ("kl_u", 1, ".2f"),
                              ("kl_w", 1, ".2f")):
        layers = [[layer[key] for layer in one[CORPUS]["layers"].values()] for one in runs]
        cells.append(" / ".join(f"{factor * mean(of_layer):{form}}"
                                for of_layer in zip(*layers, strict=True)))
    return cells


def small():
    """Claims 1 to 7."""
    results = {one["run"]: {corpus: metrics for corpus, [metrics] in one["results"].items()}
               for one in read_json(TABLE)["runs"]}

    def perplexity(system, seed, corpus=CORPUS):
        return results[run(system, seed)][corpus]["perplexity"]

    def used(system, seed):
        """Mean top-1 MU of the memory layers, in %."""
        layers = results[run(system, seed)][CORPUS]["layers"].values()
        return 100 * mean(layer["top1_mu"] for layer in layers)

    def lower(good, bad, corpus=CORPUS):
        """How far `good` ends below `bad`, in % of `bad`'s perplexity."""
        return difference([percent_below(perplexity(good, s, corpus), perplexity(bad, s, corpus))
                           for s in SEEDS])

    def start(system, seed):
        """Perplexity at step 0 over that of the initial model at its end."""
        initial = read_evaluations(run("a", seed))[-1]["perplexity"]
        return read_evaluations(run(system, seed))[0]["perplexity"] / initial

    def stale(system, seed):
        """Share of slots, in %, that no snapshot of the second half has as top-1."""
        snapshots = read_usage(run(system, seed))
        return 100 * mean((last_used(snapshots, n) <= len(snapshots) // 2).mean() for n in (2, 3))

    header = ["run", "seeds 0 / 10 / 20", *(f"{corpus} ppl" for corpus in results[run("a", 0)]),
              "MU %", "top-1 MU %", "KL_u", "KL_w"]
    print(markdown(header, [mean_row(system, results) for system in SYSTEMS]))
    print("Differences are means over the seeds (standard error; each seed).")
    print("flat: perplexity of (b), 20% more steps, below (a), %:", lower("b", "a"))
    for corpus in results[run("a", 0)]:
        print(f"1. perplexity of (f) below (b), %, {corpus}: {lower('f', 'b', corpus)}")
        print(f"2. perplexity of (f) below (e), %, {corpus}: {lower('f', 'e', corpus)}")
    print("3. top-1 MU, lower of (e), (f) - higher of (c), (d), points:", difference(
        [min(used("e", s), used("f", s)) - max(used("c", s), used("d", s)) for s in SEEDS]))
    print("4. top-1 MU, (f) - (e), points:",
          difference([used("f", s) - used("e", s) for s in SEEDS]))
    for system, name in (("f", "(f)"), ("e", "(e)"), ("r", "ResM'")):
        print(f"5. perplexity of {name} at step 0 / initial model's:",
              *(f"{start(system, s):.4f}" for s in SEEDS))
    print("6. perplexity of ResM' below (e), %:", lower("r", "e"))
    print("6. perplexity of (f) below ResM', %:", lower("f", "r"))
    print("7. stale slots, (c) - (f), points:",
          difference([stale("c", s) - stale("f", s) for s in SEEDS]))


def drift():
    """Why slots fall out of use: (f) under several settings, on the validation split."""
    def evaluations(folder):
        """{step since the initial model: what was measured}"""
        found = read_evaluations(folder)
        return {one["step"] - found[0]["step"]: one for one in found}

    def used(evaluation):
        return [100 * layer["top1_mu"] for layer in evaluation["layers"].values()]

    rows = []
    for name, run_name in DRIFT.items():
        found = evaluations(f"out/{run_name}")
        shares = ["/".join(f"{x:.0f}" for x in used(found[step])) if step in found else "-"
                  for step in STEPS]
        rows.append([name, *shares, *(f"{found[step]['perplexity']:.2f}" if step in found else "-"
                                      for step in STEPS[2:])])
    header = ["rate", *(f"top-1 MU % at {step:,}" for step in STEPS),
              *(f"ppl at {step:,}" for step in STEPS[2:])]
    print("Layers 2/3 of (f), seed 0, validation split:")
    print(markdown(header, rows))

    slower = [evaluations(f"out/lr5e-4_keys_lr_s{seed}")[STEPS[-1]] for seed in SEEDS]
    f, b = ([evaluations(run(system, seed))[STEPS[-1]] for seed in SEEDS] for system in "fb")
    print("Slower sub-keys at 5e-4, top-1 MU above (f), points:", difference(
        minus([mean(used(one)) for one in slower], [mean(used(one)) for one in f])))
    for name, others in (("(f)", f), ("(b)", b)):
        print(f"Slower sub-keys at 5e-4, perplexity below {name}, %:", difference(
            [percent_below(ours["perplexity"], other["perplexity"])
             for ours, other in zip(slower, others, strict=True)]))


def read_tuned(folder):
    """{seed: results} of a fine-tuned run, or of trainer.py; {} if there is none."""
    for path in (Path(f"out/{folder}/eval_results.json"), Path(f"out/{folder}.json")):
        if path.is_file():
            return read_json(path)["seeds"]
    return {}


def fine_tuned():
    """Claims 8 and 9, by the scores of each seed's best epoch."""
    for task, (metric, factor) in SCORES.items():
        scores = {}
        for system, run_name in FINE_TUNED.items():
            for name, suffix in ((system, ""), (f"{system} frozen", "_fixed")):
                if found := read_tuned(f"{run_name}_{task}{suffix}"):
                    scores[name] = [factor * one[f"eval_{metric}"] for one in found.values()]
                    print(f"{task}, {metric}, ({name}):", *(f"{x:.2f}" for x in scores[name]))
        for claim, better, worse in ((8, "f", "b"), (9, "e", "e frozen"), (9, "f", "f frozen")):
            if len(scores.get(better, [])) == len(scores.get(worse, [])) > 1:
                print(f"{claim}. {task}, ({better}) - ({worse}), points:",
                      difference(minus(scores[better], scores[worse])))


def train_seconds(folder, seed):
    """Of a run of finetune.py, without its evaluations."""
    records = map(json.loads, Path("out", folder, f"seed{seed}/log.jsonl").read_text().splitlines())
    return [record["elapsed"] for record in records if "elapsed" in record][-1]


def against_trainer():
    """finetune.py's scores after the last epoch and its seconds, beside those of Trainer."""
    for task, (metric, factor) in SCORES.items():
        ours, theirs = read_tuned(f"{PEER}_{task}"), read_tuned(f"{PEER}_{task}_trainer")
        if seeds := [seed for seed in ours if seed in theirs]:
            a = [factor * ours[seed][f"last_{metric}"] for seed in seeds]
            b = [factor * theirs[seed][metric] for seed in seeds]
            print(f"{task}, {metric}, finetune.py:", *(f"{x:.2f}" for x in a),
                  "Trainer:", *(f"{x:.2f}" for x in b))
            print(f"{task}, finetune.py - Trainer, points:", with_error(minus(a, b)))
            print(f"{task}, seconds of training, finetune.py:",
                  *(f"{train_seconds(f'{PEER}_{task}', seed):.0f}" for seed in seeds),
                  "Trainer:", *(f"{theirs[seed]['seconds']:.0f}" for seed in seeds))


def main():
    if Path(TABLE).is_file():
        small()
        drift()
    fine_tuned()
    against_trainer()


if __name__ == "__main__":
    run_main(main)
