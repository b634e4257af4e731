"""
measure.py's commands, from runs to tables, figures and texts.
"""
import collections
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import measure
from lib.browse import class_distances, draw_parts, task_examples, whole_distances
from lib.corpus import Corpus, cut_split, masked_heldout
from lib.errors import UserError
from lib.run import Run
from lib.tokenizer import load_tokenizer
from lib.usage import evaluate_language_model, watch_reads
from lib.weights import load_model
from tests.helpers import PIECES, prepare, save_model, tiny_bert, train, tune

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A folder with out/plain, out/tiny with memories in layers 2 and 3, and out/more."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("--max_steps=4", "--eval_interval=2", "--usage_interval=2") == 0
        assert train("--max_steps=2", "--memory_layers=", "--out=out/plain") == 0
        assert train("--max_steps=2", "--init_from=out/tiny", "--seed=7", "--out=out/more") == 0
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """The working directory: a copy of `trained`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def rows_of(text):
    """The rows of a Markdown table, dicts by column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]]
             for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def read(name):
    return json.loads(Path(name).read_text())


def test_table_2(runs, capsys):
    """Cells are the results of evaluate_language_model; usage is of the longest text."""
    text = Path("text.txt").read_text()
    Path("short.txt").write_text(text[:len(text) // 2])
    prepare("text", "short", "short.txt", "--vocab", "tiny.txt", "--val_every", "10")
    measure.main(["table", "out/plain", "out/tiny", "out/more", "--data", "short", "tiny",
                  "--device", "cpu", "--out", "t"])
    rows = rows_of(capsys.readouterr().out)
    assert [(row["run"], row["steps"], row["seed"], row["layers"]) for row in rows] == [
        ("out/plain", "2", "0", "-"), ("out/tiny", "4", "0", "2/3"),
        ("out/more", "4 + 2", "7", "2/3")]
    found = read("t.json")["runs"][1]["results"]
    for name in ("short", "tiny"):
        batches = masked_heldout(Corpus(name), "test", 16, 8)
        expected, _ = evaluate_language_model(load_model("out/tiny"), batches, CPU)
        assert found[name] == [json.loads(json.dumps(expected))]
        assert rows[1][f"{name} ppl"] == f"{expected['perplexity']:.2f}"
    assert rows[1]["accesses"].split("/")[0] == f"{expected['layers'][2]['accesses']:,}"


def test_table_6_and_figure_4(tuned, monkeypatch, capsys):
    """Both count what the real tokens of each text read, and no more."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert tune("--epochs=1") == 0
    capsys.readouterr()
    measure.main(["table", "out/tiny_own", "--out", "table6"])
    [row] = rows_of(capsys.readouterr().out)
    assert (row["task"], row["split"], row["examples"], row["layers"]) == (
        "own", "dev", "30", "2/3")
    measure.main(["by_class", "out/tiny_own", "--out", "figure4", "--device", "cpu"])
    assert Path("figure4.png").read_bytes()[1:4] == b"PNG"

    def count(path, examples):
        """The top-1 counts of layer 2, text by text, which needs no padding."""
        model, counts = load_model(path).eval(), np.zeros(64, int)

        def see(layer, slots, weights):
            if layer == 2:
                np.add.at(counts, slots[..., 0].numpy(), 1)

        with watch_reads(model, see), torch.no_grad():
            for example in examples:
                model.bert(torch.from_numpy(example.ids.astype(int))[None])
        return counts

    counts = count("out/tiny_own", task_examples("out/tiny_own", "dev")[1])
    usage = read("table6.json")[0]["layers"]["2"]
    assert (usage["accesses"], usage["top1_mu"]) == (counts.sum(), (counts > 0).mean())
    parts = draw_parts(task_examples("out/tiny_own", "train")[1])
    for record, path in zip(read("figure4.json")[::2], ("out/tiny", "out/tiny_own"), strict=True):
        assert (record["classes"], record["layer"]) == ("none against animal", 2)
        top1 = np.array([count(path, part) for part in parts])
        expected = class_distances(top1[3:5], top1[:2])  # class 1 is the positive one
        expected |= whole_distances(top1[3:].sum(0), top1[:3].sum(0))
        assert {key: record[key] for key in expected} == pytest.approx(expected, abs=0.01)
        assert record["accesses"] == (top1.sum() - top1[2].sum() - top1[5].sum()) // 4


def test_staleness_slot_by_slot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "config.json").write_text('{"memory_layers": [2]}')
    steps = [500_000, 1_000_000, 1_500_000]  # where names no longer sort by step
    top1 = np.array([[3, 0, 0, 1, 0], [0, 2, 0, 1, 0], [0, 0, 4, 1, 0]])
    for step, counts in zip(steps, top1, strict=True):
        Run(tmp_path).write_usage(step, {2: {"read": counts, "top1": counts}})
    measure.main(["staleness", str(tmp_path), "--out", str(tmp_path / "two")])
    [record] = read(tmp_path / "two.json")
    assert record["slots"] == dict(zip(["never", *map(str, steps)], [0.2, 0.2, 0.2, 0.4]))
    assert (record["layer"], record["accesses"]) == (2, 5)
    assert rows_of(capsys.readouterr().out)[0]["1500000"] == "40.0%"


def test_figure_3(runs, capsys):
    pytest.importorskip("matplotlib")
    measure.main(["curves", "out/tiny", "out/more", "--out", "new/three"])
    rows, logs = rows_of(capsys.readouterr().out), read("new/three.json")
    assert [(row["run"], row["steps"]) for row in rows] == [("out/tiny", "4"), ("out/more", "6")]
    assert logs["out/more"] == json.loads(json.dumps(Run("out/more").evaluations()))
    assert {path.suffix for path in Path("new").iterdir()} == {".json", ".md", ".png", ".svg"}


def test_slots_are_those_that_contexts_read_most(runs):
    """The table and the page, against reads of one sequence after the other."""
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "2", "--contexts", "4",
                  "--device", "cpu", "--out", "s"])
    measure.main(["browse", "out/tiny", "--contexts", "4", "--out", "memory.html"])
    page = Path("memory.html").read_text(encoding="utf-8")
    page = json.loads(page.split('id="data">')[1].split("</script>")[0])
    layer = page["layers"][0]
    model, tokenizer = load_model("out/tiny").eval(), load_tokenizer("out/tiny")
    counts, top1, reads = collections.Counter(), collections.Counter(), {}
    strength = collections.defaultdict(dict)  # {slot: {context: weight}}
    text = []
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})), torch.no_grad():
        for ids in torch.from_numpy(cut_split(Corpus("tiny"), "test", 16, 512)):
            model.bert(ids[None])
            words = [tokenizer.id_to_token(i) for i in ids.tolist()]
            for t, (slots, weights) in enumerate(zip(*reads[2], strict=True)):
                context = "".join([*words[max(0, t - 8):t], f"«{words[t]}»", *words[t + 1:t + 9]])
                text.append(context)
                counts.update(slots.flatten().tolist())
                top1.update(slots[:, 0].tolist())
                for slot in slots.unique().tolist():
                    weight = weights[slots == slot].sum().item()
                    strength[slot][context] = max(strength[slot].get(context, 0), weight)
    found = read("s.json")
    assert [slot["reads"] for slot in found] == [n for _, n in counts.most_common(2)]
    for slot in found:
        assert (slot["reads"], slot["top1"]) == (counts[slot["slot"]], top1[slot["slot"]])
        for (weight, context), (token, rounded) in zip(
                slot["contexts"], layer["contexts"][slot["slot"]], strict=True):
            assert context.replace(" ", "") == text[token] and rounded == round(weight, 2)
            assert strength[slot["slot"]][text[token]] == pytest.approx(weight, rel=1e-5)
    for slot, contexts in enumerate(layer["contexts"]):
        best = sorted(strength[slot].values(), reverse=True)[:4]
        assert [weight for _, weight in contexts] == pytest.approx(best, abs=0.006)
        assert (layer["read"][slot], layer["top1"][slot]) == (counts[slot], top1[slot])
    pieces = [page["pieces"][n].strip() for n in page["text"]]
    assert all(f"«{piece}»" in context for piece, context in zip(pieces, text, strict=True))


def test_fill_guesses_from_the_text_between_cls_and_sep(workdir, capsys):
    """A model without memory needs no corpus."""
    model = tiny_bert(vocab_size=len(PIECES), init_std=0.5).eval()
    save_model("out/run", model)
    shutil.copy("vocab.txt", "out/run")
    measure.main(["fill", "out/run", "the [MASK] sat", "--device", "cpu"])
    with torch.no_grad():
        best = model(torch.tensor([[2, 5, 4, 7, 3]]))[0, 2].softmax(0).topk(5)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    lines = map(str.split, capsys.readouterr().out.splitlines())
    assert [line for line in lines if line[0].endswith("%")] == [
        [f"{p:.1%}", PIECES[i]] for p, i in pairs]


def test_fill_shows_what_else_reads_a_slot(runs, capsys):
    measure.main(["fill", "out/tiny", "the [MASK] cat", "--contexts", "2"])
    text = capsys.readouterr().out
    assert "[MASK] at token 2:" in text
    slot = text.split("layer 2, head 1: slot ")[1].split()[0]
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "64", "--contexts", "2"])
    rows = [row for row in rows_of(capsys.readouterr().out) if row["slot"] == slot]
    assert len(rows) == 2
    for row in rows:
        assert f"({row['weight']}) {row['context']}" in text


@pytest.mark.parametrize(("command", "message"), [
    ("browse out/plain --out page", "out/plain: a model without memory"),
    ("table out/tiny", "out/tiny: not a fine-tuned run")])
def test_mistakes_get_a_line(runs, command, message):
    with pytest.raises(UserError, match=message):
        measure.main(command.split())
