"""
Hold results against what the paper claims.

A claim is a function of a lookup: of(system, column) finds a number of one of our seeds, or of the
paper. The function returns two numbers: the side to be lower and the side to be higher.
"""
import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from lib.tasks import student_interval
from reproduce import paper
from reproduce.paper import KL, MEMORIES, MU, TOP1, A, B, C, D, E, F, G, H

RULE = """
A row is decided by Student's 95% interval of the paired differences of its sides, over the seeds of
pretraining: yes if all of it has the paper's sign, **no** if all of it has the other, else
undecided. Perplexities and times are compared by their logarithm, and the interval is of the ratio
lower / higher, which is below 1 where the paper is right. Others are of lower - higher, which is
below 0. One seed is shown and decides nothing. Chance alone decides one row of 20. The interval of
three seeds reaches 2.5 standard deviations of the difference to each side, of five 1.2: a smaller
effect is not seen. Times have rounds of one machine in place of seeds.

The score of a seed of pretraining is the median over its seeds of fine-tuning. MU and top-1 MU are
of the layer with less, KL_u is of the layer with more, perplexity of the longest text. Score: the
mean of the six numbers from MNLI to CoLA, if all are there; else the mean of all numbers in the
tasks of a row. Tables 5 and 7 have the matched split of MNLI alone.
"""
VERDICTS = ["yes", "**no**", "undecided", "one seed", "not here"]
PPL, MS = "perplexity, PG-19", "ms, inference, 1 x 128, compiled"
N_PKM, TWO_N = "n layers, PKM", "2n layers"


def order(column, x, y):
    """Claim that system x has a lower number than system y."""
    return lambda of: (of(x, column), of(y, column))


def below(column, pairs):
    """Claim that each key of `pairs` has a lower number than its value.

    The side to be lower is the worst ratio, the other side is 1.
    """
    return lambda of: (np.max([of(x, column) / of(y, column) for x, y in pairs.items()]), 1)


def above_95(column, *systems):
    """Claim that all systems have more than 95%."""
    return lambda of: (95, min(of(system, column) for system in systems))


def fixed_memory(of):
    return tuple(np.mean([of(f"{system}, {update}", "score") for system in MEMORIES])
                 for update in "NY")


class Claim(NamedTuple):
    table: str
    section: str
    sentence: str
    sides: Callable  # of a lookup: the number to be lower, and the number to be higher
    ratio: bool = True  # compare the sides by their ratio, not by their difference
    not_here: str = ""  # why the demo cannot decide it


CLAIMS = [
    Claim("table1", "§1", "base +ResM is much faster than large: batches/s",
          order("batches/s, one V100", "large", "base +ResM")),
    Claim("table2", "§6", "a memory from scratch lowers perplexity: worst of (c), (d) / (a)",
          below(PPL, {C: A, D: A})),
    Claim("table2", "§6", "a memory after Init lowers perplexity: worst of (e), (f) / (b)",
          below(PPL, {E: B, F: B})),
    Claim("table2", "§6", "the residual connection lowers perplexity: (d), (c)",
          order(PPL, D, C)),
    Claim("table2", "§6", "the residual connection after Init lowers perplexity: (f), (e)",
          order(PPL, F, E)),
    Claim("table2", "§4.1", "Init lowers perplexity at equal steps: worst of (e) / (c), (f) / (d)",
          below(PPL, {E: f"{C}, longer", F: f"{D}, longer"})),
    Claim("table2", "not said", "a memory pays for its time: perplexity (f), (b) trained longer",
          order(PPL, F, f"{B}, longer")),
    Claim("table2", "§6", "500k steps more gain little: perplexity (f) / (b), (b) / (a)",
          lambda of: (of(F, PPL) / of(B, PPL), of(B, PPL) / of(A, PPL))),
    Claim("table2", "§6", "the residual connection raises top-1 MU: (c), (d)", order(TOP1, C, D),
          ratio=False),
    Claim("table2", "§6", "after Init top-1 MU is more than 95%: worst of (e), (f)",
          above_95(TOP1, E, F), ratio=False),
    Claim("table2", "§6", "MU is almost 100%: worst of (c) to (f), more than 95",
          above_95(MU, *MEMORIES), ratio=False),
    Claim("table2", "§6", "ResM alone and Init alone lower KL_u: worst of (d) / (c), (e) / (c)",
          below(KL, {D: C, E: C})),
    Claim("figure2", "§6", "with Init and ResM more slots are in use at the end: (c), (f)",
          order(paper.IN_USE, C, F), ratio=False),
    Claim("figure3", "§6", "PKM starts far worse than ResM: perplexity (f), (e)",
          order("perplexity, start", F, E)),
    Claim("table4", "§7", "plain PKM is worse than none in some tasks: SQuAD, (c), (a)",
          order("SQuAD 1.1", C, A), ratio=False),
    Claim("table4", "§7", "Init helps downstream: score (c), (e)", order("score", C, E),
          ratio=False),
    Claim("table4", "§7", "the residual connection helps downstream: score (e), (f)",
          order("score", E, F), ratio=False),
    Claim("table4", "§7", "Init and ResM beat more steps: score (b), (f)", order("score", B, F),
          ratio=False),
    Claim("table4", "§1", "base with ResM compares to large: score (h) - (f), (f) - (g)",
          lambda of: (of(H, "score") - of(F, "score"), of(F, "score") - of(G, "score")),
          ratio=False, not_here="(h) has half the steps"),
    Claim("table5", "§7", "a fixed memory lowers the score: mean of (c) to (f), N, Y",
          fixed_memory, ratio=False),
    Claim("table6", "§7", "Init and ResM raise top-1 MU: (c), (f), SST-2",
          order(TOP1, f"{C}, SST-2", f"{F}, SST-2"), ratio=False),
    Claim("table7", "§7", "Init and ResM help DistilBERT: score",
          order("score", "DistilBERT*", "DistilBERT +Init +ResM"), ratio=False),
    Claim("figure4", "§7", "(f) tells classes apart better in every layer, after fine-tuning: "
          "worst KL (c) / (f)", below("KL, after", {C: F})),
    Claim("causal", "Lample et al.", "a memory in n layers beats 2n layers: perplexity",
          order(PPL, N_PKM, TWO_N)),
    Claim("causal", "Lample et al.", "and is twice as fast: time / that of 2n layers, at most 2/3",
          lambda of: (of(N_PKM, MS) / of(TWO_N, MS), 2 / 3)),
]


def decide(claim, table, scale):
    """Make the row of a claim, with the paper's sides in brackets. None: it has no number here."""
    pairs, theirs = sides(claim, table.values()), paper_sides(claim)
    if not pairs:
        return None
    holds, interval = verdict(pairs, claim.ratio)
    not_here = {"quick": "all is cut short", "demo": claim.not_here}.get(scale)
    if not_here:
        holds = f"not here: {not_here}"
    cells = [f"{side:.4g}" for side in np.mean(pairs, axis=0)]
    for n, side in enumerate(theirs or ()):
        if cells[n] != f"{side:.4g}":  # a constant is on both sides
            cells[n] += f" ({side:.4g})"
    return [claim.table, claim.section, claim.sentence, holds, *cells, interval, len(pairs)]


def totals(rows):
    """Count the verdicts of decide()'s rows, in words."""
    found = [row[3].partition(":")[0] for row in rows]
    return ", ".join(f"{found.count(word)} {word}" for word in VERDICTS if word in found)


def sides(claim, tables):
    """Compute a claim's sides, (lower, higher), from each table that has all their numbers."""
    pairs = []
    for rows in tables:
        with contextlib.suppress(KeyError):
            pairs.append(claim.sides(partial(number, rows)))
    return [pair for pair in pairs if np.isfinite(pair).all()]


def paper_sides(claim):
    """Compute a claim's sides from the paper's numbers. None: they are not there."""
    pairs = sides(claim, [tables.get(claim.table, {}) for tables in (paper.TABLES, paper.IN_WORDS)])
    return pairs[0] if pairs else None


def number(rows, system, column):
    """Find a number in a table; KeyError if neither it nor what stands for it is there.

    "score" is score(). A memory's number is that of its worse layer, SQuAD's the mean of both.
    "KL, after" has all layers.
    """
    row = find(rows, system)
    if column == "score":
        return score(row)
    merge = {KL: np.max, "SQuAD 1.1": np.mean, "KL, after": np.array}.get(column, np.min)
    return merge(find(row, column))


def find(named, name):
    """Return what a dict has under a name of the paper, or one that stands for it."""
    while name not in named:
        name = paper.STANDS_FOR[name]
    return named[name]


def score(row):
    """Return Table 4's average, or the mean of a row's scores where it lacks tasks."""
    names = [name for name in paper.TASKS.values() if name in row]
    if not names:
        raise KeyError("no score")
    if row.keys() >= set(paper.AVERAGED):
        names = paper.AVERAGED
    return np.mean(np.hstack([row[name] for name in names]))


def verdict(pairs, ratio):
    """Decide a claim by RULE. pairs: our sides of each seed. Returns it and the interval."""
    lower, higher = np.log(pairs).T if ratio else np.array(pairs).T
    middle, reach = student_interval(lower - higher)
    ends = np.array([middle, middle - reach, middle + reach])
    middle, low, high = np.exp(ends) if ratio else ends
    if len(pairs) == 1:
        return "one seed", f"{middle:.4g}"
    holds = "yes" if ends[2] < 0 else "**no**" if ends[1] > 0 else "undecided"
    return holds, f"{middle:.4g} [{low:.4g}, {high:.4g}]"
