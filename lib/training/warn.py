"""
Warn in words when a run's evaluations say that something goes wrong.
"""
def find_warnings(evaluations, max_steps, initialized):
    """Find what is wrong at the last evaluation: {subject: one line}.

    evaluations: the log's records of evaluations, of all steps so far. initialized: whether the run
    began with a trained model. Then its perplexity should be below its start after a quarter of
    the steps. A layer's top-1 usage should not fall by a third from its best. A model that began at
    random first uses few slots, so its first quarter does not count.
    """
    first, last = evaluations[0], evaluations[-1]
    found, step = {}, last["step"]
    late = [e for e in evaluations if 4 * e["step"] >= max_steps]
    if initialized and late and last["perplexity"] > first["perplexity"]:
        found["perplexity"] = (
            f"after {step:,} of {max_steps:,} steps the perplexity, {last['perplexity']:.2f}, is "
            f"still above the initial model's, {first['perplexity']:.2f}: it may fall with the "
            "rate; a lower lr undoes less of what was learned")
    counted = evaluations if initialized else late
    for layer, usage in last["layers"].items() if counted else ():
        best = max(counted, key=lambda e, layer=layer: e["layers"][layer]["top1_mu"])
        highest = best["layers"][layer]["top1_mu"]
        if usage["top1_mu"] < 2 / 3 * highest:
            found[f"layer {layer}"] = (
                f"top-1 usage of layer {layer} fell from {highest:.1%} at step {best['step']:,} to "
                f"{usage['top1_mu']:.1%} at step {step:,}: slots fall out of use; a lower keys_lr "
                "or lr keeps more of them")
    return found


def warn(run, max_steps):
    """Print and log what an open run's last evaluation warns of, each subject once in a run."""
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
