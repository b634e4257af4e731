"""
Say in sentences what a memory did. A run's settings, log and usage snapshots are enough.

>>> print(*describe_run("out/demo_resm_init", "out/demo_more"), sep="\\n")

The thresholds, and where they come from:
CHANCE   0.02   Another number of threads moves a perplexity by 1 to 2% (results/demo.md).
USED     2/3    Of what uniform use reaches. An added memory has 98%, one from scratch 57%
                (results/study.md). Below 1/3 it is "hardly used": causal models have 13 to 17%
                (results/causal.md).
DRIFT and QUARTER are those of the warnings in the log (lib/training/warn.py).
"""
import math
import shlex
from pathlib import Path

import numpy as np

from lib.common.errors import UserError
from lib.slot_usage.counts import last_used, same_unit
from lib.slot_usage.evaluation import check_same_text
from lib.training.warn import DRIFT, after_a_quarter, usage_fall
from lib.weights.run import Run, usage_key

CHANCE, USED = 0.02, 2 / 3
MEMORY = ["memory_layers", "alpha", "n_keys", "reinit_ffn", "keys_lr"]
TRAINING = ["init_checkpoint", "max_steps", "seed", "lr", "warmup_steps", "weight_decay",
            "grad_clip", "dropout", "seq_len", "batch_size", "accumulation", "model", "n_layer",
            "n_head", "d_model", "d_ff", "dtype"]
MACHINE = ["device", "threads", "torch"]  # the last two are not in every config.json


def describe_run(path, control=None):
    """Yield at most ten sentences on the memory of a run. `control`: a run without memory.
    UserError for a run without memory or evaluations, and for a run that is not pretrained."""
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such run")
    settings = Run(path).settings([*MEMORY, *TRAINING, "first_step"])
    if not settings["memory_layers"] or settings.get("beta") == 0:
        raise UserError(f"{path}: a run without memory: name the run with memory first, then its "
                        "control")
    evaluations = Run(path).evaluations()
    controls = [evaluation for evaluation in (Run(control).evaluations() if control else [])
                if evaluation["step"] <= evaluations[-1]["step"]]
    yield describe_memory(path, settings, evaluations)
    if bad := diverged(evaluations):
        yield (f"It diverged: its perplexity at step {bad['step']:,} is no number. Train it again "
               f"with --out=out/NAME --lr={settings['lr'] / 4:g}.")
        return
    if bad := diverged(controls):
        yield f"No comparison: {control} diverged, at step {bad['step']:,}."
        controls = []
    elif control:
        yield from compare_with_control(path, control)
    else:
        yield ("No control was named: train one by the same command with --memory_layers= "
               "--out=out/NAME, and name it behind the run.")
    yield from compare_with_start(evaluations, controls)
    evaluations = same_unit(evaluations)  # a pruned run's last one counts rows
    yield describe_usage(evaluations)
    late = after_a_quarter(evaluations, settings["max_steps"], settings["first_step"])
    counted = evaluations if settings["init_checkpoint"] else late  # as for the log's warnings
    since = "" if settings["init_checkpoint"] else " after the first quarter of the steps"
    yield describe_drift(counted, since)
    yield from describe_staleness(path)
    yield from advise(settings, evaluations, late, counted)
    runs = shlex.join([*([control] if control else []), path])
    commands = [f"python measure.py curves {runs} --out curves"]
    if Run(path).newest_checkpoint() and not settings.get("n_rows"):  # a grid of slots
        commands.append(f"python measure.py browse {shlex.quote(path)} --out memory")
    yield f"Look next at: {'; '.join(commands)}"


def describe_memory(path, settings, evaluations):
    """Say what the memory is, and how it was trained."""
    keys, layers = settings["n_keys"], settings["memory_layers"]
    kind = ("in place of the FFN (PKM)" if not settings["alpha"] else
            "beside a new FFN (ResM')" if settings["reinit_ffn"] else "beside the FFN (ResM)")
    done = evaluations[-1]["step"] - settings["first_step"]
    start = settings["init_checkpoint"]
    origin = f"on from {start}" if start else "from scratch"
    rows = f", which share {rows:,} rows of values," if (rows := settings.get("n_rows")) else ""
    return (f"{path} has a memory of {keys:,} x {keys:,} slots{rows} in layer"
            f"{'s' * (len(layers) > 1)} {' and '.join(map(str, layers))}, {kind}, and was trained "
            f"{origin}: evaluated up to step {done:,} of its {settings['max_steps']:,}.")


def compare_with_control(path, control):
    """Yield which run has the lower perplexity, and what else differs between them. They are
    compared at the last step that both evaluated."""
    settings, others = (Run(run).settings([*TRAINING, "memory_layers"]) for run in (path, control))
    ours, theirs = ({e["step"]: e for e in Run(run).evaluations()} for run in (path, control))
    start = settings["init_checkpoint"]
    if start and Path(start).parent.resolve() == Path(control).resolve():
        yield (f"No comparison: {control} is the model that it began from; a control goes on from "
               "there without memory.")
        return
    try:
        check_same_text([control, path])
    except UserError as error:
        yield f"No comparison: {error}."
        return
    if not (common := ours.keys() & theirs.keys()):
        yield f"No comparison: {control} has no evaluation at a step at which {path} has one."
        return
    mine, other = ours[max(common)], theirs[max(common)]
    if mine["masked_tokens"] != other["masked_tokens"]:
        yield f"No comparison: {control} was evaluated on other sequences of the same text."
        return
    difference = mine["perplexity"] / other["perplexity"] - 1
    if abs(difference) < CHANCE:
        verdict, note = "No clear difference from", "less than 2% can be chance"
    else:
        verdict = "Better than" if difference < 0 else "Worse than"
        note = "one seed of each: try others before you trust it"
    too = ", which has a memory too," if others["memory_layers"] else ""
    side = "below" if difference < 0 else "above"
    yield (f"{verdict} the control {control}{too} at step {max(common):,}: perplexity "
           f"{mine['perplexity']:.2f}, {abs(difference):.1%} {side} its "
           f"{other['perplexity']:.2f} ({note}).")
    different = [f"{key} ({settings.get(key)!r}, control {others.get(key)!r})"
                 for key in [*TRAINING, *MACHINE] if settings.get(key) != others.get(key)]
    if max(ours) != max(theirs):
        different.append(f"the last step evaluated ({max(ours):,}, control {max(theirs):,})")
    if different:
        yield f"Not only the memory differs: also {', '.join(different)}."


def diverged(evaluations):
    """Find the first evaluation whose perplexity is no number; None without one."""
    return next((evaluation for evaluation in evaluations
                 if not math.isfinite(evaluation["perplexity"])), None)


def rise(evaluations):
    """Return the highest perplexity as a multiple of the first."""
    perplexities = [evaluation["perplexity"] for evaluation in evaluations]
    return max(perplexities) / perplexities[0]


def compare_with_start(evaluations, controls):
    """Yield how perplexity went from the run's start, and whether it rose between.
    `controls`: the evaluations of the control, [] without one."""
    first, last = evaluations[0], evaluations[-1]
    start, end = first["perplexity"], last["perplexity"]
    yield (f"From its own start at step {first['step']:,} to step {last['step']:,} its perplexity "
           f"went from {start:.2f} to {end:.2f} ({end / start - 1:+.1%}).")
    if rise(evaluations) <= 1 + CHANCE:
        return
    highest = max(evaluations, key=lambda evaluation: evaluation["perplexity"])
    line = f"It rose to {rise(evaluations):.2f} times its start, at step {highest['step']:,}"
    if controls and rise(controls) > 1 + CHANCE:
        line += (f"; the control rose to {rise(controls):.2f} times its own start, which points "
                 "to the rate, not the memory")
    elif controls:
        line += "; the control did not rise"
    yield f"{line}."


def in_layers(shares):
    """Format {layer: share}, such as "84.8% in layer 2, 84.7% in layer 3"."""
    return ", ".join(f"{share:.1%} in layer {layer}" for layer, share in shares.items())


def lowest_usage(evaluations):
    """Return the least used layer's last top-1 usage, as a share of uniform use."""
    return min(metrics["top1_mu"] / metrics["top1_mu_uniform"]
               for metrics in evaluations[-1]["layers"].values())


def describe_usage(evaluations):
    """Say how much of each layer was some token's first choice in the last evaluation."""
    layers, lowest = evaluations[-1]["layers"], lowest_usage(evaluations)
    usage = {layer: metrics["top1_mu"] for layer, metrics in layers.items()}
    uniform = next(iter(layers.values()))["top1_mu_uniform"]  # all layers have as many accesses
    word = "used" if lowest >= USED else "partly used" if lowest >= USED / 2 else "hardly used"
    unit = "rows of values" if "n_rows" in evaluations[-1] else "slots"
    return (f"The memory is {word}: {unit} that were some token's first choice (top-1 usage) are "
            f"{in_layers(usage)}; uniform use would have reached {uniform:.1%}.")


def worst_fall(evaluations):
    """Find the largest fall of a layer's top-1 usage from its best so far. Returns (share of the
    best that was lost, layer, evaluation of the best, evaluation after the fall)."""
    falls = []
    for number, low in enumerate(evaluations, 1):
        for layer in low["layers"]:
            fall, best = usage_fall(evaluations[:number], layer)
            falls.append((fall, layer, best, low))
    return max(falls, key=lambda fall: fall[0])


def describe_drift(evaluations, since):
    """Say whether slots fell out of use. since: from when on the evaluations are, in words."""
    if not evaluations:
        return f"Drift counts{since}, where no evaluation is yet."
    fall, layer, best, low = worst_fall(evaluations)
    if not fall:
        return f"It did not drift{since}: top-1 usage never fell."
    highest, lowest, now = (f"{evaluation['layers'][layer]['top1_mu']:.1%}"
                            for evaluation in (best, low, evaluations[-1]))
    word, part = ("drifted", "a third or more") if fall >= DRIFT else ("did not drift",
                                                                       "less than a third")
    return (f"It {word}{since}: top-1 usage of layer {layer} fell by {fall:.0%} ({part}), "
            f"from {highest} at step {best['step']:,} to {lowest} at step {low['step']:,}, "
            f"and ends at {now}.")


def slot_staleness(path):
    """Count when slots were last top-1. Returns a record for each memory layer of a run: `slots` is
    {step of a snapshot, or "never": share of the slots}; `accesses` is of the last snapshot."""
    snapshots, records = Run(path).usage_snapshots(), []
    for layer in Run(path).settings()["memory_layers"]:
        last = last_used(snapshots, layer)
        shares = np.bincount(last, minlength=len(snapshots) + 1) / len(last)
        accesses = snapshots[max(snapshots)][usage_key(layer, "top1")].sum()
        records.append({"run": path, "layer": layer, "accesses": int(accesses),
                        "slots": dict(zip(["never", *snapshots], shares.tolist(), strict=True))})
    return records


def describe_staleness(path):
    """Yield how many slots are stale: top-1 in no snapshot of the second half of training (as in
    results/study.md). Yields nothing for fewer than two snapshots."""
    if len(list(Run(path).folder.glob("usage/step_*.npz"))) < 2:
        return
    records = slot_staleness(path)
    number = len(records[0]["slots"]) - 1
    first_half = number // 2
    stale = {record["layer"]: sum(list(record["slots"].values())[:first_half + 1])
             for record in records}  # "never", and the snapshots of the first half
    yield (f"Stale slots, top-1 in none of the last {number - first_half} of {number} snapshots, "
           f"are {in_layers(stale)}.")


def advise(settings, evaluations, late, counted):
    """Yield what to try next, if something looks wrong. `late`: the evaluations after a quarter of
    the steps. `counted`: those that count for drift."""
    drifted = counted and worst_fall(counted)[0] >= DRIFT
    again = "try the command that trained it with --out=out/NAME"
    lower = f"{again} --lr={settings['lr'] / 4:g}"
    start = evaluations[0]["perplexity"]
    added = settings["init_checkpoint"]
    if not added and (drifted or lowest_usage(evaluations) < USED):
        yield (f"More slots are used where a memory is added to a trained model: {again} "
               "--init_from=RUN.")
    elif drifted:
        slower_keys = f"{again} --keys_lr=0.1"
        yield f"Against the drift {slower_keys if settings['keys_lr'] > 0.1 else lower}."
    elif added and any(evaluation["perplexity"] > start for evaluation in late):
        yield ("Perplexity was above its start after a quarter of the steps: if the initial "
               f"model was trained to its end, {lower}.")
    elif not settings["alpha"]:
        yield f"In the study a memory beside the FFN ended lower: {again} --alpha=1."
