"""
The table of results/study.md and its verdicts on claims 1 to 7, from the runs of results/study.sh.

$ PYTHONPATH=. python results/verdicts.py
"""
from statistics import mean, stdev

import common
from usage import last_used, read_evaluations, read_usage

TABLE = "results/study/table2.json"
CORPUS = "natural"  # that the systems were trained on
SEEDS = (0, 10, 20)
SYSTEMS = {"a": "study", "b": "study_more", "c": "study_pkm", "d": "study_resm",
           "e": "study_pkm_init", "f": "study_resm_init", "r": "study_resm_init_ffn"}  # r: ResM'


def run(system, seed):
    return f"out/{SYSTEMS[system]}_s{seed}"


def difference(d):
    """A mean with its standard error, and what it says of the claim that it is above 0."""
    m, error = mean(d), stdev(d) / len(d) ** 0.5
    verdict = "undecided" if abs(m) < 2 * error else "confirmed" if m > 0 else "refuted"
    return f"{m:+.4g} (s.e. {error:.2g}; {', '.join(f'{x:+.4g}' for x in d)}): {verdict}"


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


def main():
    results = {one["run"]: {corpus: metrics for corpus, [metrics] in one["results"].items()}
               for one in common.read_json(TABLE)["runs"]}

    def perplexity(system, seed, corpus=CORPUS):
        return results[run(system, seed)][corpus]["perplexity"]

    def used(system, seed):
        """Mean top-1 MU of the memory layers, in %."""
        layers = results[run(system, seed)][CORPUS]["layers"].values()
        return 100 * mean(layer["top1_mu"] for layer in layers)

    def lower(good, bad, corpus=CORPUS):
        """How far `good` ends below `bad`, in % of `bad`'s perplexity."""
        return difference([100 * (1 - perplexity(good, s, corpus) / perplexity(bad, s, corpus))
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
    print(common.markdown(header, [mean_row(system, results) for system in SYSTEMS]))
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


if __name__ == "__main__":
    common.run(main)
