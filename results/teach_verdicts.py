"""
Print the tables and verdicts of results/teach.md, and draw its two pictures.

$ python results/teach_verdicts.py            # from results/teach/*.jsonl, which teach.py wrote
"""
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from verdicts import verdict

from lib.common.errors import run_main
from lib.common.progress import markdown
from lib.slot_usage.figures import COLORS, subplots

FOLDER = Path(__file__).parent / "teach"
METHODS = {"rows": "chosen rows", "keep": "chosen rows, 300 questions kept",
           "sgd": "chosen rows, SGD", "all": "all rows", "lora": "LoRA", "full": "all weights"}
LOOKS = dict(zip(METHODS, (COLORS[n] for n in (1, 0, 5, 3, 2, 4)), strict=True))
SEEDS = 1, 2, 3
GOAL = 0.95
TEXTS = {"wikitext": "WikiText-2", "novels": "novels"}


def read(name):
    """Read a log: its settings, its evaluations. None if it is not there."""
    file = FOLDER / f"{name}.jsonl"
    if not file.exists():
        return None
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return lines[0], lines[1:]


def at_goal(log):
    """Return a log's first evaluation with a recall of GOAL, None if there is none."""
    return log and next((line for line in log[1] if line["recall"] >= GOAL), None)


def print_seeds(folder=""):
    """Print each method and seed at GOAL, and the last evaluation of longer runs."""
    rows = []
    for method, title in METHODS.items():
        for seed in SEEDS:
            if not (log := read(f"{folder}{method}_{seed}")):
                continue
            first = at_goal(log)
            for line in [first] if log[1][-1] == first else [first, log[1][-1]]:
                if line:
                    seconds = line["seconds"] / log[0]["facts"]
                    rows.append([title, f"{log[0]['lr']:g}", seed, line["step"],
                                 f"{seconds:.1f}", line["recall"], line["new"],
                                 *(f"{line[text]:+.1%}" for text in TEXTS),
                                 f"{line['known']:.0%}" if "known" in line else "-"])
    print(markdown(["trained", "rate", "seed", "steps", "s a fact", "recall", "new phrasing",
                    *TEXTS.values(), "known"], rows))


def print_verdicts():
    """Print claims 1 to 3, in points (1% of perplexity or of the questions)."""
    ends = {(method, seed): at_goal(read(f"{method}_{seed}")) for method in METHODS
            for seed in SEEDS}
    last = {seed: log[1][-1] for seed in SEEDS if (log := read(f"rows_{seed}"))}
    for folder in ("", "round_1/"):  # at two rates of all weights
        full = {seed: log for seed in last if (log := read(f"{folder}full_{seed}"))}
        if len(full) > 1:
            rate = full[SEEDS[0]][0]["lr"]
            print(f"claim 3, new phrasings, longer rows minus all weights at {rate:g}:",
                  verdict([100 * (last[seed]["new"] - at_goal(log)["new"])
                           for seed, log in full.items()]))
    for text, title in TEXTS.items():
        for other, share, claim in (("lora", 0.1, 1), ("full", 0.1, 1), ("all", 1.0, 2)):
            pairs = [(ends["rows", seed], ends[other, seed]) for seed in SEEDS]
            if all(a and b for a, b in pairs):
                print(f"claim {claim}, {title}, {share:g} of {METHODS[other]} minus rows:",
                      verdict([100 * (share * b[text] - a[text]) for a, b in pairs]))
        pairs = [(last.get(seed), ends["full", seed]) for seed in SEEDS]
        if all(a and b for a, b in pairs):
            print(f"claim 3, {title}, a fifth of all weights' minus longer rows':",
                  verdict([100 * (0.2 * b[text] - a[text]) for a, b in pairs]))


def draw_forgetting():
    """Draw recall in new phrasings against forgetting, a line for each run."""
    figure, [panels] = subplots(1, 2, 3.0, sharey=True)
    for axes, (text, title) in zip(panels, TEXTS.items(), strict=True):
        for (method, label), (folder, style), seed in itertools.product(
                METHODS.items(), (("", "o-"), ("round_1/", ":")), SEEDS):
            if log := read(f"{folder}{method}_{seed}"):
                lines = [line for line in log[1] if "new" in line]
                axes.plot([max(100 * line[text], 0.1) for line in lines],
                          [100 * line["new"] for line in lines], style, color=LOOKS[method],
                          markersize=4, label=label if seed == 1 and not folder else None)
        axes.set(title=title, xscale="log", xlabel="rise of perplexity, %", ylim=(0, 100))
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    panels[0].set_ylabel("recall in new phrasings, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  handlelength=1.5, fontsize=9)
    figure.savefig(FOLDER / "forgetting.png")


def lessons():
    """Yield each run of ten lessons that is there: facts of a lesson, method, title, last line."""
    for (name, facts), (method, title) in itertools.product(
            (("lessons", 30), ("lessons_100", 100)), METHODS.items()):
        if log := read(f"{name}_{method}"):
            kept = "chosen rows, SGD, earlier lessons kept"
            yield facts, method, kept if method == "keep" else title, log[1][-1]


def print_lessons():
    """Print what is recalled after the tenth lesson."""
    rows = []
    for facts, _, title, last in lessons():
        (first, _), means = last["kept"][0], zip(*last["kept"], strict=True)
        rows.append([facts, title, f"{first:.2f}", *(f"{sum(mean) / 10:.2f}" for mean in means),
                     *(f"{last[text]:+.1%}" for text in TEXTS)])
    print(markdown(["facts", "after the tenth lesson", "the first", "mean", "new phrasings",
                    *TEXTS.values()], rows))


def draw_lessons():
    """Draw what is recalled of each of ten lessons after the last one."""
    figure, [panels] = subplots(1, 2, 2.9, sharey=True)
    labels = {}
    for facts, method, title, last in lessons():
        axes = panels[0 if facts == 30 else 1]
        for part, style in ((0, "o-"), (1, "o:")):
            [line] = axes.plot(range(1, 11), [100 * pair[part] for pair in last["kept"]], style,
                               color=LOOKS[method], markersize=4)
            labels.setdefault(title, line)
        axes.set(xlabel=f"lesson of {facts} facts", ylim=(0, 103))
        axes.set_xticks(range(1, 11))
    panels[0].set_ylabel("recall after the tenth, %")
    figure.legend(labels.values(), labels, loc="outside upper center", ncols=2, handlelength=2.5,
                  fontsize=9)
    figure.savefig(FOLDER / "lessons.png")


def main():
    print_seeds()
    print_seeds("round_1/")
    print_verdicts()
    print_lessons()
    draw_forgetting()
    draw_lessons()


if __name__ == "__main__":
    run_main(main)
