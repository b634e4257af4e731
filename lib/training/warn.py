"""
Warn in words when a run's evaluations say that something goes wrong.

The limits, and where they come from:
DRIFT    1/3   Top-1 usage lost 5% of its best at a fitting rate, 40% at four times that rate
               (results/study.md, "Why slots fall out of use").
QUARTER  1/4   Of the steps. Perplexity that is still above its start then shows that the rate is
               too high for a model that was trained to its end (our reading).
"""
DRIFT, QUARTER = 1 / 3, 1 / 4


def find_warnings(evaluations, max_steps, initialized):
    """Find what is wrong at the last evaluation: {subject: one line}.

    evaluations: the log's records of evaluations, of all steps so far. initialized: whether the run
    began with a trained model. Its perplexity should be below its start after a quarter of the
    steps. No layer should drift. In a model that began at random usage can first fall and then
    return (results/causal.md): its first quarter does not count.
    """
    first, last = evaluations[0], evaluations[-1]
    found, step = {}, last["step"]
    late = after_a_quarter(evaluations, max_steps)
    if initialized and late and last["perplexity"] > first["perplexity"]:
        found["perplexity"] = (
            f"after {step:,} of {max_steps:,} steps the perplexity, {last['perplexity']:.2f}, is "
            f"still above the initial model's, {first['perplexity']:.2f}: it may fall with the "
            "rate; a lower lr undoes less of what was learned")
    counted = evaluations if initialized else late
    for layer, usage in last["layers"].items() if counted else ():
        fall, best = usage_fall(counted, layer)
        if fall >= DRIFT:
            found[f"layer {layer}"] = (
                f"top-1 usage of layer {layer} fell from {best['layers'][layer]['top1_mu']:.1%} at "
                f"step {best['step']:,} to {usage['top1_mu']:.1%} at step {step:,}: slots fall out "
                "of use; a lower keys_lr or lr keeps more of them")
    return found


def after_a_quarter(evaluations, max_steps, first_step=0):
    """List the evaluations after a quarter of the steps, which count from `first_step`."""
    return [e for e in evaluations if e["step"] - first_step >= QUARTER * max_steps]


def usage_fall(evaluations, layer):
    """Compare a layer's last top-1 usage with its best. Returns (share of the best that was lost,
    evaluation of the best)."""
    best = max(evaluations, key=lambda e: e["layers"][layer]["top1_mu"])
    last = evaluations[-1]
    return 1 - last["layers"][layer]["top1_mu"] / best["layers"][layer]["top1_mu"], best


def warn(run, max_steps):
    """Print and log the warnings of an open run's last evaluation, each subject once."""
    if not run.log_file:
        return  # only the first rank writes
    records = run.records()
    evaluations = [record for record in records if "perplexity" in record]
    known = {record["about"] for record in records if "warning" in record}
    initialized = bool(run.settings()["init_checkpoint"])
    for about, line in find_warnings(evaluations, max_steps, initialized).items():
        if about not in known:
            print(f"warning: {line}", flush=True)
            run.log({"step": evaluations[-1]["step"], "warning": line, "about": about})
