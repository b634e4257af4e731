"""
The sentences about a memory: runs made by hand for each of them, and a real one.
"""
import json
import math
from pathlib import Path

import numpy as np
import pytest

import measure
from lib.common.errors import UserError
from lib.slot_usage import figures
from lib.slot_usage.report import describe_run, slot_staleness, worst_fall
from lib.weights.run import Run
from tests.helpers import assert_one_line, train

SETTINGS = {
    "init_checkpoint": "out/base/step_001000", "first_step": 1000, "max_steps": 400, "seed": 1,
    "lr": 0.002, "keys_lr": 1.0, "warmup_steps": 10, "weight_decay": 0.01, "grad_clip": 1.0,
    "dropout": 0.1, "seq_len": 16, "batch_size": 2, "accumulation": 2, "model": "demo",
    "n_layer": 0, "n_head": 0, "d_model": 0, "d_ff": 0, "dtype": "float32", "dataset": "docs",
    "tokenizer_hash": "abc", "objective": "masked", "memory_layers": [2, 3], "alpha": 1.0,
    "n_keys": 8, "reinit_ffn": False}


def write_run(name, perplexities, usage=((0.9, 0.8),), masked_tokens=50, **settings):
    """Write out/<name>: evaluations 100 steps apart. usage: top-1 MU of layers 2 and 3 in each
    evaluation, the last for all that follow; () for a run without memory."""
    settings = {**SETTINGS, **({} if usage else {"memory_layers": []}), **settings}
    records = []
    for n, perplexity in enumerate(perplexities):
        shares = usage[min(n, len(usage) - 1)] if usage else ()
        layers = {layer: {"top1_mu": share, "top1_mu_uniform": 0.95}
                  for layer, share in zip(settings["memory_layers"], shares, strict=True)}
        records += [{"step": 100 * n, "perplexity": perplexity, "accuracy": 0.5, "layers": layers,
                     "masked_tokens": masked_tokens}, {"step": 100 * n, "loss": 1.0}]
    path = Path("out", name)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(settings))
    (path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sentences(*runs):
    found = list(describe_run(*runs))
    assert len(found) <= 10 and all(sentence.endswith((".", "curves", "memory"))
                                    for sentence in found)
    return found


def only(word, found):
    """The one sentence that starts with a word."""
    [sentence] = [sentence for sentence in found if sentence.startswith(word)]
    return sentence


def test_better_than_the_control_and_used():
    run = write_run("resm", [40, 39, 30, 27, 24])
    found = sentences(run, write_run("more", [39.5, 38, 33, 30, 25], usage=()))
    assert found == [
        ("out/resm has a memory of 8 x 8 slots in layers 2 and 3, beside the FFN (ResM), and was "
         "trained on from out/base/step_001000: evaluated up to step 400 of its 400."),
        ("Better than the control out/more at step 1,400: perplexity 24.00, 4.0% below its 25.00 "
         "(one seed of each: try others before you trust it)."),
        ("From its own start at step 1,000 to step 1,400 its perplexity went from 40.00 to 24.00 "
         "(-40.0%)."),
        ("The memory is used: slots that were some token's first choice (top-1 usage) are 90.0% "
         "in layer 2, 80.0% in layer 3; uniform use would have reached 95.0%."),
        "It did not drift: top-1 usage never fell.",
        "Look next at: python measure.py curves out/more out/resm --out curves"]


@pytest.mark.parametrize(("ours", "begins", "size"), [
    (25.6, "Worse than the control out/more", "2.4% above its 25.00"),
    (25.4, "No clear difference from the control out/more", "1.6% above its 25.00"),
    (24.6, "No clear difference from the control out/more", "1.6% below its 25.00")])
def test_a_difference_below_2_percent_can_be_chance(ours, begins, size):
    run, control = write_run("resm", [40, ours]), write_run("more", [40, 25], usage=())
    sentence = only(begins, sentences(run, control))
    assert size in sentence and ("can be chance" in sentence) == begins.startswith("No clear")


def test_what_else_differs_is_said_and_the_last_common_step_compared():
    run = write_run("resm", [40, 30, 20])
    control = write_run("more", [40, 32, 31, 1], usage=(), lr=0.001, max_steps=500,
                        threads=2)
    found = sentences(run, control)
    assert "at step 1,200: perplexity 20.00, 35.5% below its 31.00" in only("Better", found)
    assert only("Not only", found) == (
        "Not only the memory differs: also max_steps (400, control 500), lr (0.002, control "
        "0.001), threads (None, control 2), the last step evaluated (1,200, control 1,300).")
    other = write_run("both", [40, 32, 30])
    assert "out/both, which has a memory too, at" in only("Better", sentences(run, other))


def test_runs_that_cannot_be_compared():
    run = write_run("resm", [40, 30], data={"train": "2e"})
    for name, reason, settings in (
            ("a", "another corpus", {"dataset": "mine"}),
            ("b", "another sequence length", {"seq_len": 32}),
            ("c", "other sequences of the same text", {"masked_tokens": 51}),
            ("d", "no evaluation at a step", {"first_step": 1050}),
            ("e", "another text of the same name", {"data": {"train": "1f"}})):
        found = sentences(run, write_run(name, [40, 30], usage=(), **settings))
        assert reason in only("No comparison", found) and len(found) == 6
        assert "from 40.00 to 30.00 (-25.0%)" in only("From its own start", found)
    base = write_run("base", [50] * 11, usage=(), init_checkpoint="", first_step=0)
    for name in (base, str(Path(base).absolute())):
        found = only("No comparison", sentences(run, name))
        assert "out/base is the model that it began from" in found


def test_a_run_that_diverged():
    """Its perplexity is null in the log. No sentence has a nan."""
    bad, good = write_run("bad", [40, 30, math.nan]), write_run("good", [40, 30, 25])
    found = sentences(bad, good)
    assert len(found) == 2 and "at step 1,200 is no number" in found[1]
    assert "--lr=0.0005" in found[1]
    found = sentences(good, bad)
    assert only("No comparison", found) == f"No comparison: {bad} diverged, at step 1,200."
    assert only("From its own start", found) and "nan" not in " ".join(found)
    assert only("It diverged", sentences(write_run("first", [math.nan, 30])))
    later = write_run("later", [40, 31, 26, math.nan])  # after the run's last step
    found = sentences(good, later)
    assert "below its 26.00" in only("Better", found) and "nan" not in " ".join(found)


def test_rows_of_a_pruned_memory_are_not_counted_as_slots():
    """A run that was pruned twice: both evaluations of rows are left out."""
    run = write_run("pruned", [40, 30, 31, 35], usage=((0.9, 0.8), (0.9, 0.8), (1, 1)))
    log = Path(run, "log.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    rows = iter([0, 0, 17, 5])
    for record in records:
        if "perplexity" in record and (n_rows := next(rows)):
            record["n_rows"] = n_rows
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "slots that were some token's first choice (top-1 usage) are 90.0% in" in only(
        "The memory is", sentences(run))
    for record in records:  # a run that went on from a pruned one counts rows from its start
        if "perplexity" in record:
            record["n_rows"] = 17
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "rows of values that were" in only("The memory is", sentences(run))


def test_without_a_control_it_is_said_how_to_train_one():
    found = sentences(write_run("resm", [40, 30]))
    assert "--memory_layers= --out=out/NAME" in only("No control", found)
    assert found[-1] == "Look next at: python measure.py curves out/resm --out curves"


def test_perplexity_above_its_start():
    run = write_run("resm", [40, 60, 44, 38])
    assert "1.50 times its start, at step 1,100." in only("It rose", sentences(run))
    found = sentences(run, write_run("more", [40, 60.8, 44, 38], usage=()))
    assert "rose to 1.52 times its own start, which points to the rate" in only("It rose", found)
    assert only("Perplexity was above", found).endswith("--out=out/NAME --lr=0.0005.")
    found = sentences(run, write_run("calm", [40, 39, 38, 37], usage=()))
    assert "; the control did not rise." in only("It rose", found)
    early = sentences(write_run("early", [40, 40.5, 38, 37], max_steps=800))
    assert not any(line.startswith(("It rose", "Perplexity was")) for line in early)


def test_unused_and_drifting():
    fallen = [(0.6, 0.9), (0.75, 0.9), (0.24, 0.9), (0.3, 0.9)]
    found = sentences(write_run("resm", [40, 39, 38, 37], usage=fallen))
    assert only("The memory is hardly used", found)
    assert only("It drifted", found) == (
        "It drifted: top-1 usage of layer 2 fell by 68% (a third or more), from 75.0% at step "
        "1,100 to 24.0% at step 1,200, and ends at 30.0%.")
    assert only("Against", found).endswith("--out=out/NAME --keys_lr=0.1.")
    found = sentences(write_run("slow", [40, 39, 38, 37], usage=fallen, keys_lr=0.1))
    assert only("Against", found).endswith("--out=out/NAME --lr=0.0005.")
    scratch = {"init_checkpoint": "", "first_step": 0, "usage": fallen}
    found = sentences(write_run("scratch", [40, 39, 38], **scratch))
    assert "from scratch" in found[0] and only("More slots", found).endswith("--init_from=RUN.")
    assert "to 24.0% at step 200" in only("It drifted", found)
    # what falls in the first quarter does not count for a model that began at random
    early = sentences(write_run("early", [40, 39, 38, 37], **scratch, max_steps=800))
    assert "quarter of the steps: top-1 usage never fell" in only("It did not drift after", early)
    first = sentences(write_run("first", [40, 39], **scratch, max_steps=800))
    assert only("Drift counts after", first)
    for name, low, word, drifted in (("a", 0.55, "partly used", True),
                                     ("b", 0.61, "partly used", False), ("c", 0.64, "used", False)):
        found = sentences(write_run(name, [40, 39], usage=[(0.9, 0.9), (0.9, low)]))
        assert only(f"The memory is {word}:", found)
        assert only("It drifted" if drifted else "It did not drift", found)


def test_the_worst_fall_is_from_the_best_before_it():
    evaluations = Run(write_run("resm", [9] * 5, usage=[
        (0.5, 0.2), (0.4, 0.8), (0.9, 0.6), (0.8, 0.7), (0.85, 0.9)])).evaluations()
    fall, layer, best, low = worst_fall(evaluations)
    assert (round(fall, 3), layer, best["step"], low["step"]) == (0.25, "3", 1100, 1200)


def test_kinds_of_memory():
    found = sentences(write_run("pkm", [9, 8], alpha=0.0))
    assert "in place of the FFN (PKM)" in found[0]
    assert only("In the study", found).endswith("--alpha=1.")
    assert "beside a new FFN (ResM')" in sentences(write_run("new", [9, 8], reinit_ffn=True))[0]
    one = write_run("one", [9, 8], usage=[(0.9,)], memory_layers=[4])
    assert "in layer 4, beside" in sentences(one)[0]


def test_stale_slots_are_those_of_no_snapshot_in_the_second_half():
    path = write_run("resm", [40, 30])
    tops = {2: [(1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 1, 0)],
            3: [(1, 1, 1, 1), (1, 0, 0, 0), (1, 0, 0, 0)]}
    for n in range(3):
        counts = {layer: {"read": np.array(top[n]), "top1": np.array(top[n])}
                  for layer, top in tops.items()}
        Run(path).write_usage(100 * (n + 1), counts)
        assert len([line for line in sentences(path) if line.startswith("Stale")]) == (n > 0)
    assert slot_staleness(path)[0]["slots"] == {"never": 0.25, 100: 0.25, 200: 0.25, 300: 0.25}
    assert only("Stale", sentences(path)) == (
        "Stale slots, top-1 in none of the last 2 of 3 snapshots, are 50.0% in layer 2, 75.0% in "
        "layer 3.")


def test_mistakes_in_one_line(capsys):
    run = write_run("resm", [40, 30])
    no_evaluation, plain = write_run("new", []), write_run("more", [40, 30], usage=())
    unread = write_run("unread", [40, 30], beta=0.0)
    Path("out/tuned").mkdir()
    Path("out/tuned/config.json").write_text(json.dumps({"task": "own"}))
    for args, words in (((plain,), ["out/more", "without memory"]),
                        ((unread,), ["out/unread", "without memory"]),
                        ((no_evaluation,), ["out/new", "no evaluation"]),
                        ((run, no_evaluation), ["out/new", "no evaluation"]),
                        (("out/none",), ["out/none"]), ((run, "out/none"), ["out/none"]),
                        (("out/tuned",), ["out/tuned", "pretrain.py"])):
        assert_one_line(capsys, "report", *args, words=words, main=measure.main)
    for command in ("curves", "staleness", "by_class"):
        assert_one_line(capsys, command, run, "--names", "a", "b", main=measure.main,
                        words=["2 names for 1 runs"])
    Path(run, "usage").mkdir()
    for step in (100, 200):
        Path(run, f"usage/step_{step:06d}.npz").write_text("no snapshot")
    with pytest.raises(UserError, match="damaged"):
        list(describe_run(run))


def test_a_real_run(place, capsys, monkeypatch):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    assert train("--max_steps=4", "--usage_interval=2", "--eval_interval=2") == 0
    assert train("--max_steps=4", "--memory_layers=", "--out=out/control") == 0
    capsys.readouterr()
    measure.main(["report", "out/tiny", "out/control"])
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("out/tiny has a memory of 8 x 8 slots in layers 2 and 3")
    assert "the control out/control at step 4: perplexity" in found[1] and len(found) <= 10
    assert only("Stale", found) and not [line for line in found if line.startswith("Not only")]
    assert found[-1] == (
        "Look next at: python measure.py curves out/control out/tiny --out curves; "
        "python measure.py browse out/tiny --out memory")
    drawn = {}
    for name in ("draw_curves", "draw_staleness"):
        monkeypatch.setattr(figures, name, lambda data, names, name=name: drawn.update(
            {name: names}) or Figure())
    measure.main(["curves", "out/tiny", "out/control", "--names", "with", "without", "--out", "a"])
    measure.main(["staleness", "out/tiny", "--out", "b"])
    assert drawn == {"draw_curves": {"out/tiny": "with", "out/control": "without"},
                     "draw_staleness": {"out/tiny": "tiny"}}
