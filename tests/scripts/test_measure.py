"""
Tables, figures and what slots store: measure.py's commands.
"""
import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import finetune
import measure
from for_transformers.export import export
from lib.corpus import Corpus, cut_split, masked_heldout
from lib.errors import UserError
from lib.run import NO_RECIPE, Run, process_facts
from lib.tasks import find_task
from lib.tokenizer import load_tokenizer
from lib.training import Trainer
from lib.usage import (
    class_distances,
    draw_halves,
    evaluate_language_model,
    training_examples,
    training_text,
    watch_reads,
)
from lib.weights import find_weights, load_model
from model import Classifier
from tests.helpers import PIECES, ROOT, prepare, record_search, save_model, tiny_bert, train, tune


def test_table(place, capsys):
    """Cells are the results of evaluate_language_model; JSON keeps every masking."""
    prepare("text", "more", "text.txt", "--vocab", "tiny.txt", "--val_every", "5")
    assert train("--max_steps=2") == 0
    assert train("--max_steps=2", "--memory_layers=", "--out=out/plain") == 0
    capsys.readouterr()
    measure.main(["table", "out/plain", "out/tiny", "--data", "tiny", "more", "--repeats", "2",
                  "--batch_size", "3", "--device", "cpu", "--out", "results/t2.md"])
    out = capsys.readouterr().out
    assert sorted(os.listdir("results")) == ["t2.json", "t2.md"]
    text = Path("results/t2.md").read_text()
    assert text in out and "data/tiny" in text
    assert "of one seed" in text
    header, _, plain, tiny = ([cell.strip() for cell in line.split("|")[1:-1]]
                              for line in text.splitlines()[:4])
    assert header[:5] == ["run", "steps", "seed", "tiny ppl", "more ppl"]
    assert plain[1:3] == ["2", "0"] and plain[5:] == ["-"] * 9
    model, device = load_model("out/tiny"), torch.device("cpu")
    expected = {name: [evaluate_language_model(model, masked_heldout(
        Corpus(name), "test", 16, 8, masking=n), device)[0] for n in (0, 1)]
        for name in ("more", "tiny")}
    saved = json.loads(Path("results/t2.json").read_text())
    assert [r["run"] for r in saved["runs"]] == ["out/plain", "out/tiny"]
    for name, results in expected.items():
        found = saved["runs"][1]["results"][name]
        for one, same in zip(results, found, strict=True):
            assert same["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
            for n in (2, 3):
                assert same["layers"][str(n)] == pytest.approx(one["layers"][n], rel=1e-6)
        ppl = [r["perplexity"] for r in results]
        assert f"{np.mean(ppl):.2f} [{min(ppl):.2f}, {max(ppl):.2f}]" == tiny[
            header.index(f"{name} ppl")]
    row, layers = dict(zip(header, tiny, strict=True)), [r["layers"] for r in expected["tiny"]]
    assert row["layers"] == "2/3" and row["accesses"] == f"{layers[0][2]['accesses']:,}"
    for name, key, scale, form in [("MU %", "mu", 100, ".1f"), ("KL_w", "kl_w", 1, ".2f"),
                                   ("top-1 MU %", "top1_mu", 100, ".1f"),
                                   ("KL_u", "kl_u", 1, ".2f"),
                                   ("effective k", "effective_k", 1, ".1f")]:
        assert row[name] == "/".join(f"{scale * np.mean([u[n][key] for u in layers]):{form}}"
                                     for n in (2, 3))
    measure.main(["table", "out/tiny/step_000002", "--data", "tiny", "--sequences", "2"])
    assert "| 64" in capsys.readouterr().out  # 2 sequences x 16 tokens x 2 heads


def test_table_shows_the_steps(place, monkeypatch):
    """The steps are the initial model's + the run's own; a stopped run shows its max_steps too."""
    assert train("--max_steps=4", "--checkpoint_interval=2") == 0
    assert train("--max_steps=2", "--init_from=out/tiny", "--seed=7", "--out=out/more") == 0
    step = Trainer.step

    def stopped(trainer, n):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, n)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        train("--max_steps=6", "--init_from=out/more", "--out=out/half")
    export("out/tiny", "folder")
    assert train("--max_steps=3", "--init_from=folder", "--out=out/after") == 0
    runs = ["out/tiny", "out/tiny/step_000002", "out/more", "out/half", "out/after"]
    measure.main(["table", *runs, "--data", "tiny", "--sequences", "2", "--out", "t"])
    found = json.loads(Path("t.json").read_text())
    assert [(run["steps"], run["seed"]) for run in found["runs"]] == [
        ("4", 0), ("2 of 4", 0), ("4 + 2", 7), ("6 + 1 of 6", 0), ("? + 3", 0)]


def test_a_weights_folder_is_measured_like_a_run(place, capsys):
    """Its half-precision weights in float32; a fine-tuned model is refused."""
    safetensors = pytest.importorskip("safetensors.torch")
    assert train("--max_steps=2", "--memory_layers=") == 0
    export("out/tiny", "folder")
    file = Path("folder/model.safetensors")
    safetensors.save_file({n: w.half() for n, w in safetensors.load_file(file).items()}, file)
    assert {p.dtype for p in load_model("folder").parameters()} == {torch.float32}
    capsys.readouterr()
    measure.main(["table", "out/tiny", "folder", "--data", "tiny", "--device", "cpu", "--out", "t"])
    assert "all sequences of 16. " in Path("t.md").read_text()  # the shortest that one is for
    assert [training_text(path)[0] for path in ("out/tiny", "folder")] == [16, 128]
    saved = json.loads(Path("t.json").read_text())
    ours, theirs = (run["results"]["tiny"][0] for run in saved["runs"])
    assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-3)
    assert theirs["masked_tokens"] == ours["masked_tokens"] and theirs["layers"] == {}
    assert [(run["steps"], run["seed"]) for run in saved["runs"]] == [("2", 0), ("?", "?")]
    measure.main(["fill", "folder", "[MASK] ."])
    tuned = Classifier(load_model("out/tiny").bert.config, 2)
    save_model("out/tuned", tuned, step=1)
    shutil.copy("out/tiny/vocab.txt", "out/tuned")
    with pytest.raises(UserError, match="out/tuned: a fine-tuned checkpoint has no"):
        measure.main(["table", "out/tiny", "out/tuned", "--data", "tiny"])
    shutil.rmtree("folder")
    assert train("--max_steps=2", "--out=out/memory") == 0
    export("out/memory", "folder")
    with pytest.raises(UserError, match="folder: its corpus is not known"):
        measure.main(["slots", "folder", "--layer", "2"])


def test_usage_on_a_task(tuned, capsys):
    """Table 6 and Figure 4 count what real tokens read in the best model, and no more."""
    pytest.importorskip("matplotlib")
    assert tune("--epochs=2") == 0
    run = Path("out/tiny_own")
    capsys.readouterr()
    measure.main(["table", str(run), "--out", "table6"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()
            if line.startswith("| out")]
    assert [cell.strip() for cell in rows[0][2:5]] == ["own", "200", "2/3"]
    pytest.importorskip("safetensors")
    export(run, "exported")  # what its slots know can be seen, too
    measure.main(["slots", "exported", "--layer", "2", "--data", "tiny", "--device", "cpu"])
    assert "Layer 2 of exported" in capsys.readouterr().out

    tokenizer = load_tokenizer(Path("out/tiny/vocab.txt"))
    rows = [line.split("\t") for line in Path("own/train.tsv").read_text().splitlines()[1:]]
    models, counts = {"after": run / "seed0/best", "before": "out/tiny"}, {}
    for when, path in models.items():
        model, top1 = load_model(find_weights(path)[0]).eval(), {}
        with watch_reads(model, lambda n, slots, _, top1=top1: top1.update({n: slots[..., 0]})):
            for text, label in rows:
                model.bert(torch.tensor([tokenizer.encode(f"[CLS] {text} [SEP]").ids]))
                for n in (2, 3):
                    each = counts.setdefault((when, n, label), [])
                    each.append(top1[n].flatten().bincount(minlength=64).numpy())
    layers = json.loads(Path("table6.json").read_text())[0]["layers"]
    for n in (2, 3):
        both = sum(sum(counts["after", n, label]) for label in ("animal", "none"))
        assert layers[str(n)]["top1_mu"] == (both > 0).mean()
        assert layers[str(n)]["accesses"] == both.sum()

    measure.main(["by_class", str(run / "seed0"), "--out", "figure4"])
    found = json.loads(Path("figure4.json").read_text())
    assert [(own["run"], own["when"], own["layer"]) for own in found] == [
        (str(run / "seed0"), "before", 2), (str(run / "seed0"), "before", 3),
        (str(run / "seed0"), "after", 2), (str(run / "seed0"), "after", 3)]
    _, _, *examples = training_examples(run, None)
    halves = dict(zip(("animal", "none"), draw_halves(*examples), strict=True))
    members = {label: [n for n, row in enumerate(rows) if row[1] == label] for label in halves}
    size = min(map(len, members.values())) // 2
    for label, both in halves.items():  # two parts of a class, all of one size
        assert both.shape == (2, size) and len({*both.flat}) == 2 * size
        assert {*both.flat} <= {*members[label]} and sorted(both.flat) != list(both.flat)
    number = {n: members[label].index(n) for label in members for n in members[label]}
    for own in found:
        none, animal = (np.array([sum(counts[own["when"], own["layer"], label][number[n]]
                                      for n in half) for half in halves[label]])
                        for label in ("none", "animal"))
        expected = class_distances(none, animal)  # class 1 is "none"
        assert {key: own[key] for key in expected} == pytest.approx(expected, rel=0.02, abs=0.005)
        assert own["accesses"] == (none.sum() + animal.sum()) // 4
    assert Path("figure4.png").read_bytes()[1:4] == b"PNG"
    measure.main(["table", str(run / "seed0/best"), "--sequences", "9"])
    assert "| own  | 9 " in capsys.readouterr().out
    with pytest.raises(UserError, match="pairs: expected two classes .* found \\[\\]"):
        draw_halves(find_task("pairs"), *examples[1:])
    assert train("--memory_layers=", "--out=out/plain", "--max_steps=1") == 0
    assert tune("--init_from=out/plain", "--max_steps=1") == 0
    for args, message in [(["by_class", "out/tiny"], "not a fine-tuned run"),
                          (["by_class", "out/plain_own"], "out/plain_own: a model without memory"),
                          (["table", "out/tiny", str(run)], "out/tiny: not a fine-tuned run"),
                          (["table", "out/tiny"], "out/tiny: not a fine-tuned run"),
                          (["by_class", str(run), "--sequences", "3"],
                           "expected two classes .* found .1, 2. "),
                          (["glue", "out/tiny"], "no fine-tuned run"),
                          (["glue", "out/none"], "out/none: no fine-tuned run")]:
        with pytest.raises(UserError, match=message):
            measure.main(args)


def test_glue_prints_the_papers_columns(workdir, capsys):
    """Medians, Table 4's average, and what is missing as missing."""
    paper = {"squad": {"exact_match": 83.9, "f1": 90.8},
             "mnli": {"accuracy": 0.86, "accuracy_mm": 0.858},
             "qqp": {"accuracy": 0.914, "f1": 0.9}, "QNLI": {"accuracy": 0.904},
             "SST-2": {"accuracy": 0.94}, "cola": {"matthews_correlation": 0.641, "accuracy": 0.8}}
    for system, most in (("out/f", 6), ("out/g", 5)):
        for updated in (True, False):
            for task, results in list(paper.items())[:most if updated else 1]:
                for seed, shift in ((0, 0), (1, -0.1), (2, 0.05)):
                    folder = Path(f"{system}_{task}{updated}", f"seed{seed}")
                    folder.mkdir(parents=True)
                    settings = {"init_from": system, "update_memory": updated, "task": task,
                                "seed": seed, "tokenizer_hash": "", "init_checkpoint": "",
                                "first_step": 0}
                    (folder / "config.json").write_text(json.dumps(settings))
                    (folder / "eval_results.json").write_text(json.dumps(
                        {f"eval_{key}": value + shift for key, value in results.items()}))
    measure.main(["glue", *map(str, sorted(Path("out").iterdir())), "--out", "table4"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0] == ["initial model", "memory update", "seeds", "SQuAD 1.1 (EM/F1)",
                       "MNLI-(m/mm)", "QQP", "QNLI", "SST-2", "CoLA (Matt)", "Avg"]
    cells = ["83.9/90.8", "86.0/85.8", "91.4", "90.4", "94.0", "64.1", "85.3"]
    found = {tuple(row[:3]): row[3:] for row in rows[2:]}
    assert found == {("out/f", "Y", "3"): cells, ("out/g", "Y", "3"): [*cells[:5], "-", "-"],
                     **{(f"out/{name}", "N", "3"): [cells[0], *"------"] for name in "fg"}}
    assert json.loads(Path("table4.json").read_text())[0]["seeds"]["mnli"].keys() == {"0", "1", "2"}
    (folder.parent / "seed3").mkdir()
    with pytest.raises(UserError, match="out: no fine-tuned run"):
        measure.main(["glue", "out"])


def fine_tuned(folder, accuracy, **settings):
    """Write what measure.py glue reads in a run."""
    base = {"init_from": "out/f", "update_memory": True, "task": "rte", "seed": 0, "lr": 2e-5,
            "log_interval": 100, "tokenizer_hash": "", "init_checkpoint": "", "first_step": 0}
    Path(folder).mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps(base | settings))
    Path(folder, "eval_results.json").write_text(json.dumps({"eval_accuracy": accuracy}))


def test_a_recipe_is_every_setting_that_must_not_change():
    may_change = {field.name for field in dataclasses.fields(finetune.Config)
                  if field.metadata["may_change"]}
    assert NO_RECIPE == may_change | {"seed", "init_from", "ranks", *process_facts()}


def test_glue_pools_nothing_but_seeds(workdir, capsys):
    """Another lr is another row; a log interval is not; one cell is not filled twice."""
    fine_tuned("out/a/seed0", 0.5, threads=1, commit="1f")
    fine_tuned("out/a/seed1", 0.7, seed=1, log_interval=5, a_new_setting=0, threads=2)
    fine_tuned("out/b/seed0", 0.9, lr=1e-4)
    fine_tuned("out/c/seed0", 0.8, task="sst2", lr=3e-5)
    Path("out/pretrained").mkdir()
    measure.main(["glue", *map(str, sorted(Path("out").iterdir())), "out/a/seed1"])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in out.splitlines() if line.startswith("|")]
    assert [(row[0], row[2], row[7], row[-1]) for row in rows[2:]] == [
        ("out/f lr=2e-05", "2", "-", "60.0"), ("out/f lr=0.0001", "1", "-", "90.0"),
        ("out/f", "1", "80.0", "-")]
    assert "out/pretrained is left out: not fine-tuned, or not done" in out
    fine_tuned("out/d/seed0", 0.6, log_interval=7)
    with pytest.raises(UserError, match="out/a/seed0 and out/d/seed0 .* the same seed"):
        measure.main(["glue", "out/a", "out/b", "out/d"])


def test_tables_4_5_and_7_by_the_documented_command(tuned, capsys):
    """Runs have their default names, with and without updates of the memory."""
    page = (ROOT / "docs/fine_tuning.md").read_text()
    command = re.search(r"^python measure.py (glue .*?)\s+#", page, re.MULTILINE)[1]
    for args in (["--task=own"], ["--task=own", "--update_memory=False"], ["--task=squad"]):
        assert tune(*args, "--max_steps=1", "--max_len=24") == 0
    capsys.readouterr()
    expanded = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True,
                              check=True).stdout
    measure.main(expanded.split())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert cells["Y"]["own"] != "-" and cells["N"]["own"] != "-"
    assert cells["Y"]["SQuAD 1.1 (EM/F1)"] != "-" and cells["N"]["SQuAD 1.1 (EM/F1)"] == "-"


def test_staleness(place, capsys):
    pytest.importorskip("matplotlib")
    rng, run = np.random.default_rng(0), Path("out/hand")
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({
        "tokenizer_hash": "", "init_checkpoint": "", "first_step": 0, "memory_layers": [2, 3]}))
    with pytest.raises(UserError, match="out/hand/usage"):
        measure.main(["staleness", "out/hand"])
    steps = [500_000, 1_000_000, 1_500_000]  # where names no longer sort by step
    tops = {n: [rng.integers(0, 2, 50) * 3 for _ in steps] for n in (2, 3)}
    for i, step in enumerate(steps):
        Run(run).write_usage(step, {n: {"read": tops[n][i], "top1": tops[n][i]} for n in tops})
    measure.main(["staleness", "out/hand", "--out", "figures/two"])
    out = capsys.readouterr().out
    saved = json.loads(Path("figures/two.json").read_text())
    for bars, (n, top1) in zip(saved, tops.items(), strict=True):
        plain = collections.Counter(max((step for step, t in zip(steps, top1, strict=True) if t[s]),
                                        default="never") for s in range(50))
        assert bars["layer"] == n and plain["never"] > 0
        assert bars["slots"] == {str(key): count / 50 for key, count in plain.items()}
        for count in plain.values():
            assert f"{count / 50:.1%}" in out
    assert Path("figures/two.png").read_bytes()[1:4] == b"PNG"
    assert b"<svg" in Path("figures/two.svg").read_bytes()


def test_curves_go_on_where_the_initial_model_ended(place, capsys):
    pytest.importorskip("matplotlib")
    assert train("--max_steps=4", "--checkpoint_interval=2", "--eval_interval=2") == 0
    for name in ("more", "pkm"):
        assert train("--max_steps=4", f"--out=out/{name}", "--init_from=out/tiny") == 0
    capsys.readouterr()
    measure.main(["curves", "out/tiny", "out/more", "out/pkm", "--out", "figures/a.png"])
    out = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in out[2:5]] == [
        [" out/tiny ", " 4     "], [" out/more ", " 8     "], [" out/pkm  ", " 8     "]]
    assert sorted(os.listdir("figures")) == ["a.json", "a.md", "a.png", "a.svg"]
    more = Run("out/more").evaluations()
    assert more[0]["step"] == 4
    assert json.loads(Path("figures/a.json").read_text())["out/more"] == more


def test_slots_are_those_that_the_contexts_read_most(place, capsys):
    assert train("--max_steps=2") == 0
    capsys.readouterr()
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "2", "--contexts", "4",
                  "--device", "cpu", "--out", "s"])
    most = json.loads(Path("s.json").read_text())
    assert Path("s.md").read_text() in capsys.readouterr().out
    model, tokenizer = load_model("out/tiny").eval(), load_tokenizer("out/tiny")
    ids = torch.from_numpy(cut_split(Corpus("tiny"), "test", 16, 512))
    calls = record_search(model)
    with torch.no_grad():  # sequence by sequence
        for sequence in ids:
            model.bert(sequence[None])
    reads, words = [], []
    for sequence, (slots, weights) in zip(ids, calls[2], strict=True):
        tokens = [tokenizer.id_to_token(i) for i in sequence.tolist()]
        read = zip(slots.flatten(1).tolist(), weights.flatten(1).tolist(), strict=True)
        for t, (slot, weight) in enumerate(read):
            reads.append(list(zip(slot, weight, strict=True)))
            marked = [*tokens[:t], f"«{tokens[t]}»", *tokens[t + 1:]]
            words.append("".join(marked[max(0, t - 8):t + 9]))
    counts = collections.Counter(slot for read in reads for slot, _ in read)
    assert [s["reads"] for s in most] == [n for _, n in counts.most_common(2)]
    for slot in most:
        assert slot["reads"] == counts[slot["slot"]]
        strength = collections.defaultdict(float)
        for context, read in zip(words, reads, strict=True):
            weight = sum(w for s, w in read if s == slot["slot"])
            if weight:
                strength[context] = max(strength[context], weight)
        best = sorted(strength.values(), reverse=True)[:4]
        assert [w for w, _ in slot["contexts"]] == pytest.approx(best, rel=1e-5)
        for weight, context in slot["contexts"]:
            assert strength[context.replace(" ", "")] == pytest.approx(weight, rel=1e-5)
    never = next(s for s in range(64) if s not in counts)
    measure.main(["slots", "out/tiny", "--layer", "2", "--slot", str(never),
                  str(most[0]["slot"]), "--data", "tiny", "--contexts", "1", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "(never read)" in out and most[0]["contexts"][0][1] in out


def printed_rows(capsys, *command):
    """The cells of the table that a command prints, and its header."""
    capsys.readouterr()
    measure.main(list(command))
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in
                        capsys.readouterr().out.splitlines() if line.startswith("|"))
    return header, rows


def run_by_hand(folder, **settings):
    """A run of nothing but its settings."""
    Path(folder).mkdir(parents=True)
    settings = {"first_step": 0, "memory_layers": [2], "tokenizer_hash": "h", "dataset": "tiny",
                "objective": "masked", "seq_len": 16, **settings}
    Path(folder, "config.json").write_text(json.dumps(settings))
    return Run(folder)


def test_curves_are_in_a_table_from_first_to_last(workdir, capsys):
    run = run_by_hand("out/a", first_step=100)
    records = [{"step": step, "perplexity": perplexity, "accuracy": accuracy, "masked_tokens": 9,
                "layers": {"2": {"top1_mu": mu}, "3": {"top1_mu": 2 * mu}}}
               for step, perplexity, accuracy, mu in ((0, 30.0, 0.1, 0.125), (7, 20.0, 0.3, 0.25))]
    records.append({"step": 8, "loss": 1.0})
    Path(run.folder, "log.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    header, rows = printed_rows(capsys, "curves", "out/a")
    assert dict(zip(header, rows[0], strict=True)) == {
        "run": "out/a", "steps": "107", "first ppl": "30.00", "last ppl": "20.00",
        "accuracy": "30.0%", "layers": "2/3", "top-1 MU %": "25.0/50.0"}


def test_staleness_has_the_accesses_of_the_newest_snapshot(workdir, capsys):
    run = run_by_hand("out/a")
    for step, top1 in ((5, [4, 0, 0, 0]), (10, [0, 3, 3, 0])):
        run.write_usage(step, {2: {"read": np.array(top1), "top1": np.array(top1)}})
    header, rows = printed_rows(capsys, "staleness", "out/a")
    assert dict(zip(header, rows[0], strict=True)) == {
        "run": "out/a", "layer": "2", "accesses": "6", "never": "25.0%", "5": "25.0%",
        "10": "50.0%"}


def test_slots_have_reads_and_top_1_reads_in_their_columns(workdir, monkeypatch, capsys):
    reads = np.array([[[5, 1]], [[5, 2]], [[1, 5]]]), np.full((3, 1, 2), 0.5)
    corpus = types.SimpleNamespace(name="tiny", layers={2: reads}, n_slots={2: 9},
                                   contexts=lambda layer, slot, most: [(0.5, f"reads {slot}")])
    monkeypatch.setattr(measure, "read_corpus", lambda args: ("out/a", corpus))
    header, rows = printed_rows(capsys, "slots", "out/a", "--layer", "2", "--most", "3")
    assert header == ["slot", "reads", "top-1", "weight", "context"]
    assert rows == [["5", "3", "2", "0.50", "reads 5"], ["1", "2", "1", "0.50", "reads 1"],
                    ["2", "1", "0", "0.50", "reads 2"]]


def test_distances_of_classes_are_in_their_columns(workdir, monkeypatch, capsys):
    record = {"run": "out/a", "layer": 2, "when": "before", "kl_between": 0.1, "kl_floor": 0.2,
              "kl": 0.3, "iou_between": 0.4, "iou_floor": 0.5, "iou": 0.6, "accesses": 7,
              "n_rows": 0}
    monkeypatch.setattr(measure, "compare_classes", lambda *more: [record])
    header, rows = printed_rows(capsys, "by_class", "out/a", "--device", "cpu")
    assert header[3:9] == ["KL", "floor", "corrected", "IOU", "floor", "corrected"]
    assert rows == [["out/a", "2", "before", *(f"0.{n}00" for n in range(1, 7)), "7"]]


def test_scores_of_several_numbers_of_seeds(workdir, capsys):
    for task, seeds in (("rte", 3), ("sst2", 1)):
        for seed in range(seeds):
            fine_tuned(f"out/{task}/seed{seed}", 0.5, task=task, seed=seed)
    header, rows = printed_rows(capsys, "glue", "out/rte", "out/sst2")
    assert dict(zip(header, rows[0], strict=True))["seeds"] == "1-3"


def test_fill_guesses_from_the_text_between_cls_and_sep(workdir, capsys):
    model = tiny_bert(vocab_size=len(PIECES), init_std=0.5)
    save_model("out/run", model.eval())
    shutil.copy("vocab.txt", "out/run")
    Path("out/run/config.json").write_text('{"seq_len": 16, "dataset": "none"}')
    measure.main(["fill", "out/run", "the [MASK] sat", "--device", "cpu"])
    with torch.no_grad():
        best = model(torch.tensor([[2, 5, 4, 7, 3]]))[0, 2].softmax(0).topk(5)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    lines = map(str.split, capsys.readouterr().out.splitlines())
    assert [line for line in lines if line[0].endswith("%")] == [
        [f"{p:.1%}", PIECES[i]] for p, i in pairs]


def test_reads_are_of_the_corpus_and_sequences_that_were_asked_for(workdir, monkeypatch):
    save_model("out/run", tiny_bert(vocab_size=len(PIECES), memory_layers=(2,)))
    shutil.copy("vocab.txt", "out/run")
    seen, reads = [], (np.zeros((3, 1, 2), int), np.ones((3, 1, 2)))
    corpus = types.SimpleNamespace(name="other", layers={2: reads}, n_slots={2: 16},
                                   contexts=lambda *more: [])
    monkeypatch.setattr(measure, "CorpusReads",
                        lambda model, *asked: seen.append(asked) or corpus)
    more = ["--data", "other", "--sequences", "7", "--device", "cpu"]
    measure.main(["slots", "out/run", "--layer", "2", *more])
    measure.main(["fill", "out/run", "the [MASK]", *more])
    assert seen == [("out/run", "other", 7)] * 2


@pytest.mark.parametrize("args", [["prune", "--keep", "0.5", "--curve", "c"],
                                  ["by_class", "--out", "c"]])
def test_without_matplotlib_no_work_begins(monkeypatch, args):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for work in ("prune_run", "compare_classes"):
        monkeypatch.setattr(measure, work, pytest.fail)
    with pytest.raises(UserError, match="pip install matplotlib"):
        measure.main([*args[:1], "out/a", *args[1:]])


def test_curves_are_of_the_logs_numbers(workdir, monkeypatch):
    """Perplexity as it is, top-1 usage in percent, against the steps of both models."""
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    run_by_hand("out/a", first_step=100)
    records = [{"step": step, "perplexity": perplexity, "accuracy": 0.5, "masked_tokens": 9,
                "layers": {"2": {"top1_mu": usage}}}
               for step, perplexity, usage in ((0, 30.0, 0.125), (4, 25.0, 0.75), (8, 20.0, 0.25))]
    Path("out/a/log.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    drawn = []
    monkeypatch.setattr(matplotlib_figure.Figure, "savefig",
                        lambda figure, path, **more: drawn.append(figure) or path.write_text(""))
    measure.main(["curves", "out/a", "--out", "curves"])
    lines = [line.get_xydata().tolist() for axes in drawn[0].axes for line in axes.lines]
    for points in ([[100, 30], [104, 25], [108, 20]], [[100, 12.5], [104, 75], [108, 25]]):
        assert points in lines


def test_fill_names_words_slots_and_what_else_reads_them(place, capsys):
    assert train("--max_steps=2") == 0
    capsys.readouterr()
    word = Path("out/tiny/vocab.txt").read_text().splitlines()[-1]
    measure.main(["fill", "out/tiny", f"{word} [MASK] {word}", "--contexts", "2",
                  "--device", "cpu"])
    out = capsys.readouterr().out
    assert "[MASK] at token 2:" in out and out.count("%") == 5
    assert "layer 2 read" in out and "layer 3 read" in out
    assert len(re.findall(r"^    head \d: \d+ \(0\.", out, re.MULTILINE)) == 2 * 2  # layers x heads
    slot = int(re.search(r"head 1: (\d+)", out)[1])
    measure.main(["slots", "out/tiny", "--layer", "2", "--slot", str(slot), "--contexts", "2",
                  "--device", "cpu"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "«" in line]
    assert len(rows) == 2
    for row in rows:  # the same contexts, with the same weight
        assert f"({row[4].strip()}) {row[5].strip()}" in out
    shutil.rmtree("data")  # a run can be used without its corpus
    measure.main(["fill", "out/tiny", f"{word} [MASK] {word}"])
    out = capsys.readouterr().out
    assert "data/tiny: no such corpus" in out and out.count("%") == 5
