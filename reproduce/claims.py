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

from reproduce import paper
from reproduce.paper import KL, MEMORIES, MU, TOP1, A, B, C, D, E, F, G, H

RULE = """
A row says yes if the difference of its sides, the mean over the seeds, has the paper's sign and is
more than twice its standard error; **no** if the other sign is as clear; else undecided. With one
seed the difference must be more than half of the paper's own, or than 10% of the lower side where
the paper has no number. Without any difference, chance decides 18% of the rows of three seeds, 12%
of five. Seeds of Tables 4, 5 and 7 share one pretrained model.

MU and top-1 MU are of the layer with less, KL_u is of the layer with more, perplexity of the
longest text. Score: the mean of the six numbers from MNLI to CoLA, if all are there; else the mean
of all numbers in the tasks of a row. Tables 5 and 7 have the matched split of MNLI alone.
"""
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


def growth_of_time(of):
    return tuple(of(f"{keys} keys, 1024^2 slots", MS) / of(f"{keys} keys, 128^2 slots", MS)
                 for keys in ("product", "flat"))


class Claim(NamedTuple):
    table: str
    section: str
    sentence: str
    sides: Callable  # of a lookup: the number to be lower, and the number to be higher
    not_here: str = ""  # why the demo cannot decide it


CLAIMS = [
    Claim("table1", "§1", "base +ResM is much faster than large",
          below("batches/s, one V100", {"large": "base +ResM"})),
    Claim("table2", "§6", "a memory always lowers perplexity: worst of (c), (d) / (a), (e), (f) / "
          "(b)", below(PPL, {C: A, D: A, E: B, F: B})),
    Claim("table2", "§6", "the residual connection lowers perplexity: worst of (d) / (c), (f) / "
          "(e)", below(PPL, {D: C, F: E})),
    Claim("table2", "§4.1", "Init lowers perplexity: worst of (e) / (c), (f) / (d)",
          below(PPL, {E: C, F: D})),
    Claim("table2", "§6", "500k steps more gain little: perplexity (f) / (b), (b) / (a)",
          lambda of: (of(F, PPL) / of(B, PPL), of(B, PPL) / of(A, PPL))),
    Claim("table2", "§6", "the residual connection raises top-1 MU: (c), (d)", order(TOP1, C, D)),
    Claim("table2", "§6", "after Init top-1 MU is more than 95%: worst of (e), (f)",
          above_95(TOP1, E, F)),
    Claim("table2", "§6", "MU is almost 100%: worst of (c) to (f), more than 95",
          above_95(MU, *MEMORIES)),
    Claim("table2", "§6", "ResM alone and Init alone lower KL_u: worst of (d) / (c), (e) / (c)",
          below(KL, {D: C, E: C})),
    Claim("figure2", "§6", "with Init and ResM more slots are in use at the end: (c), (f)",
          order(paper.IN_USE, C, F)),
    Claim("figure3", "§6", "PKM starts far worse than ResM: perplexity (f) / (e)",
          below("perplexity, start", {F: E})),
    Claim("table4", "§7", "plain PKM is worse than none in some tasks: SQuAD, (c), (a)",
          order("SQuAD 1.1", C, A)),
    Claim("table4", "§7", "Init helps downstream: score (c), (e)", order("score", C, E)),
    Claim("table4", "§7", "the residual connection helps downstream: score (e), (f)",
          order("score", E, F)),
    Claim("table4", "§7", "Init and ResM beat more steps: score (b), (f)", order("score", B, F)),
    Claim("table4", "§1", "base with ResM compares to large: score (h) - (f), (f) - (g)",
          lambda of: (of(H, "score") - of(F, "score"), of(F, "score") - of(G, "score")),
          "(h) has half the steps"),
    Claim("table5", "§7", "a fixed memory lowers the score: mean of (c) to (f), N, Y",
          fixed_memory),
    Claim("table6", "§7", "Init and ResM raise top-1 MU: (c), (f), SST-2",
          order(TOP1, f"{C}, SST-2", f"{F}, SST-2")),
    Claim("table6", "§7", "with much data MU is almost 100%: worst of (c) to (f), MNLI, more than "
          "95", above_95(MU, *(f"{system}, MNLI" for system in MEMORIES)), "it has one task"),
    Claim("table7", "§7", "Init and ResM help DistilBERT: score",
          order("score", "DistilBERT*", "DistilBERT +Init +ResM")),
    Claim("figure4", "§7", "(f) tells classes apart better in every layer, after fine-tuning: "
          "worst KL (c) / (f)", below("KL, after", {C: F})),
    Claim("causal", "Lample et al.", "a memory in n layers beats 2n layers: perplexity",
          below(PPL, {N_PKM: TWO_N})),
    Claim("causal", "Lample et al.", "and is twice as fast: time / that of 2n layers, at most 2/3",
          lambda of: (of(N_PKM, MS) / of(TWO_N, MS), 2 / 3)),
    Claim("slots", "Lample et al.", "with 64 times the slots time grows less by product keys than "
          "by flat keys", growth_of_time),
]


def decide(claim, table, scale):
    """Make the row of a claim, with the paper's sides in brackets."""
    pairs, theirs = sides(claim, table.values()), paper_sides(claim)
    not_here = {"quick": "all is cut short", "demo": claim.not_here}.get(scale)
    holds = f"not here: {not_here}" if not_here else verdict(pairs, theirs)
    cells = [f"{side:.4g}" for side in np.mean(pairs, axis=0)] if pairs else ["", ""]
    for n, side in enumerate(theirs or ()):
        if cells[n] != f"{side:.4g}":  # a constant is on both sides
            cells[n] = f"{cells[n]} ({side:.4g})".strip()
    return [claim.table, claim.section, claim.sentence, holds, *cells, len(pairs)]


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
    """Return what a dict has under the paper's name, else under the name that stands for it."""
    return named[name if name in named else paper.STANDS_FOR.get(name)]


def score(row):
    """Return Table 4's average, or the mean of a row's scores where it lacks tasks."""
    names = [name for name in paper.TASKS.values() if name in row]
    if not names:
        raise KeyError("no score")
    if row.keys() >= set(paper.AVERAGED):
        names = paper.AVERAGED
    return np.mean(np.hstack([row[name] for name in names]))


def verdict(pairs, theirs):
    """Decide a claim by RULE. pairs: our sides of each seed; theirs: the paper's sides or None."""
    if not pairs:
        return "no result"
    differences = np.diff(pairs)
    if len(pairs) > 1:
        margin = 2 * differences.std(ddof=1) / len(pairs) ** 0.5
    elif theirs:
        margin = (theirs[1] - theirs[0]) / 2
    else:
        margin = 0.1 * np.abs(pairs).min()
    if abs(differences.mean()) <= margin:
        return "undecided"
    return "yes" if differences.mean() > 0 else "**no**"
