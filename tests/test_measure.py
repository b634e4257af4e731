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
from lib.browse import class_distances, draw_halves, training_examples
from lib.corpus import Corpus, cut_split, masked_heldout
from lib.errors import UserError
from lib.run import Run
from lib.tokenizer import load_tokenizer
from lib.usage import evaluate_language_model, watch_reads
from lib.weights import load_model
from tests.helpers import PIECES, save_model, tiny_bert, train, tune

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
    return tmp_path


def rows_of(text):
    """The rows of a Markdown table, dicts by column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]]
             for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def read(name):
    return json.loads(Path(name).read_text())


def test_table_2(runs, capsys):
    """Cells are the results of evaluate_language_model."""
    measure.main(["table", "out/plain", "out/tiny", "out/more", "--data", "tiny", "--device", "cpu",
                  "--out", "t"])
    rows = rows_of(capsys.readouterr().out)
    assert rows_of(Path("t.md").read_text()) == rows
    assert [(row["run"], row["steps"], row["seed"], row["layers"]) for row in rows] == [
        ("out/plain", "2", "0", "-"), ("out/tiny", "4", "0", "2/3"),
        ("out/more", "4 + 2", "7", "2/3")]
    batches = masked_heldout(Corpus("tiny"), "test", 16, 8)
    expected, _ = evaluate_language_model(load_model("out/tiny"), batches, CPU)
    [found] = read("t.json")["runs"][1]["results"]["tiny"]
    assert found == json.loads(json.dumps(expected))
    assert rows[1]["tiny ppl"] == f"{found['perplexity']:.2f}"
    measure.main(["table", "out/tiny/step_000004", "--data", "tiny", "--sequences", "2"])
    assert rows_of(capsys.readouterr().out)[0]["accesses"] == "64/64"  # 2 x 16 tokens x 2 heads


def test_table_6_and_figure_4(tuned, monkeypatch, capsys):
    """Both count what the real tokens of each text read, and no more."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert tune("--epochs=1") == 0
    capsys.readouterr()
    measure.main(["table", "out/tiny_own", "--out", "table6"])
    [row] = rows_of(capsys.readouterr().out)
    assert (row["task"], row["examples"], row["layers"]) == ("own", "200", "2/3")
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

    _, examples = training_examples("out/tiny_own", None)
    counts = count("out/tiny_own", examples)
    usage = read("table6.json")[0]["layers"]["2"]
    assert (usage["accesses"], usage["top1_mu"]) == (counts.sum(), (counts > 0).mean())
    records = read("figure4.json")
    assert [(record["when"], record["layer"]) for record in records] == [
        ("before", 2), ("before", 3), ("after", 2), ("after", 3)]
    for record, path in ((records[0], "out/tiny"), (records[2], "out/tiny_own")):
        top1 = np.array([count(path, half) for half in draw_halves("own", examples)])
        expected = class_distances(top1[2:], top1[:2])  # class 1 is the positive one
        assert {key: record[key] for key in expected} == pytest.approx(expected, abs=0.01)
        assert record["accesses"] == top1.sum() // 4


def write_run(folder, evaluations=(60,), **settings):
    """Write what a comparison reads of a run. evaluations: their numbers of tokens."""
    settings = {"objective": "masked", "seq_len": 16, "data": {"val": "1"}, "first_step": 0,
                "memory_layers": [2], **settings}
    Path(folder).mkdir()
    Path(folder, "config.json").write_text(json.dumps(settings))
    lines = [{"step": n, "perplexity": 9.0, "accuracy": 0.5, "layers": {}, "masked_tokens": count}
             for n, count in enumerate(evaluations)]
    Path(folder, "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_staleness_slot_by_slot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    run = write_run(tmp_path / "run")
    steps = [500_000, 1_000_000, 1_500_000]  # where names no longer sort by step
    top1 = np.array([[3, 0, 0, 1, 0], [0, 2, 0, 1, 0], [0, 0, 4, 1, 0]])
    for step, counts in zip(steps, top1, strict=True):
        Run(run).write_usage(step, {2: {"read": counts, "top1": counts}})
    measure.main(["staleness", run, "--out", str(tmp_path / "two")])
    [record] = read(tmp_path / "two.json")
    assert record["slots"] == dict(zip(["never", *map(str, steps)], [0.2, 0.2, 0.2, 0.4]))
    assert (record["layer"], record["accesses"]) == (2, 5)
    shares = rows_of(capsys.readouterr().out)[0]
    assert (shares["never"], shares["1500000"]) == ("20.0%", "40.0%")


@pytest.mark.parametrize(("changed", "what"), [
    ({"data": {"val": "2"}}, "data"), ({"evaluations": (60, 50)}, "masked_tokens")])
def test_perplexities_of_other_texts_are_not_compared(tmp_path, changed, what):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", (60, 60))]
    measure.main(["curves", *runs])
    runs.append(write_run(tmp_path / "c", **changed))
    with pytest.raises(UserError, match=f"c has another {what}"):
        measure.main(["curves", *runs])


def test_figure_3(runs, capsys):
    pytest.importorskip("matplotlib")
    measure.main(["curves", "out/tiny", "out/more", "--out", "new/three"])
    rows, logs = rows_of(capsys.readouterr().out), read("new/three.json")
    assert [(row["run"], row["steps"]) for row in rows] == [("out/tiny", "4"), ("out/more", "6")]
    assert logs["out/more"] == json.loads(json.dumps(Run("out/more").evaluations()))
    last = logs["out/tiny"][-1]
    assert rows[0]["top-1 MU"] == "/".join(f"{last['layers'][n]['top1_mu']:.1%}" for n in "23")
    assert {path.suffix for path in Path("new").iterdir()} == {".json", ".md", ".png", ".svg"}


def test_slots_are_those_that_contexts_read_most(runs, capsys):
    """Against reads of one sequence after the other."""
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "2", "--contexts", "4",
                  "--device", "cpu", "--out", "s"])
    assert Path("s.md").read_text() in capsys.readouterr().out
    model, tokenizer = load_model("out/tiny").eval(), load_tokenizer("out/tiny")
    counts, top1, reads = collections.Counter(), collections.Counter(), {}
    strength = collections.defaultdict(dict)  # {slot: {context: weight}}
    with watch_reads(model, lambda layer, *read: reads.update({layer: read})), torch.no_grad():
        for ids in torch.from_numpy(cut_split(Corpus("tiny"), "test", 16, 512)):
            model.bert(ids[None])
            words = [tokenizer.id_to_token(i) for i in ids.tolist()]
            for t, (slots, weights) in enumerate(zip(*reads[2], strict=True)):
                context = "".join([*words[max(0, t - 8):t], f"«{words[t]}»", *words[t + 1:t + 9]])
                counts.update(slots.flatten().tolist())
                top1.update(slots[:, 0].tolist())
                for slot in slots.unique().tolist():
                    weight = weights[slots == slot].sum().item()
                    strength[slot][context] = max(strength[slot].get(context, 0), weight)
    found = read("s.json")
    assert [slot["reads"] for slot in found] == [n for _, n in counts.most_common(2)]
    for slot in found:
        number, own = slot["slot"], strength[slot["slot"]]
        assert (slot["reads"], slot["top1"]) == (counts[number], top1[number])
        assert [weight for weight, _ in slot["contexts"]] == pytest.approx(
            sorted(own.values(), reverse=True)[:4], rel=1e-5)
        for weight, context in slot["contexts"]:
            assert own[context.replace(" ", "")] == pytest.approx(weight, rel=1e-5)


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
    assert "[MASK] at token 2:" in text and "layer 2 read" in text and "layer 3 read" in text
    slot = text.split("head 1: ")[1].split()[0]
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "64", "--contexts", "2"])
    rows = [row for row in rows_of(capsys.readouterr().out) if row["slot"] == slot]
    assert len(rows) == 2
    for row in rows:
        assert f"({row['weight']}) {row['context']}" in text


def test_browse_writes_a_page(runs):
    measure.main(["browse", "out/tiny", "--out", "memory.html"])
    page = Path("memory.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert (data["title"], data["seq_len"]) == ("out/tiny", 16)
    assert [layer["layer"] for layer in data["layers"]] == [2, 3]
    assert sum(data["layers"][0]["top1"]) == 2 * len(data["text"])  # heads


@pytest.mark.parametrize(("command", "message"), [
    ("slots out/tiny --layer 1", r"out/tiny: no memory in layer 1; its memory layers: \[2, 3\]"),
    ("fill out/tiny word", "no .MASK. in 'word'"),
    ("sample out/tiny word", "out/tiny is a masked language model"),
    ("browse out/plain --out page", "out/plain: a model without memory"),
    ("table out/tiny", "out/tiny: not a fine-tuned run; table takes others with --data"),
    ("table out/tiny --data other", "out/tiny was trained with another vocabulary"),
    ("glue out/tiny", "out/tiny: no fine-tuned run"),
    ("curves", "the following arguments are required: out/RUN")])
def test_mistakes_get_a_line(runs, command, message):
    with pytest.raises(UserError, match=message):
        measure.main(command.split())
