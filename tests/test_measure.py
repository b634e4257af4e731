"""
measure.py's commands, from runs to tables, figures and predictions; test_slots.py has the others.
"""
import itertools
import json
import math
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot

import measure
from lib.corpus import Corpus, masked_heldout
from lib.run import Run
from lib.settings import UserError
from lib.tasks import encode_examples, find_task, read_split
from lib.tokenizer import text_tokenizer
from lib.training import evaluate_language_model
from lib.usage import watch_reads
from lib.weights import load_model
from model import Classifier, value_tables
from tests import helpers
from tests.helpers import PIECES, prepare, train, tune, write_settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """Train out/plain, out/tiny with memories in layers 2 and 3, and out/more."""
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
    """Make the working directory, a copy of `trained`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_window(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    yield
    pyplot.close("all")


def rows_of(text):
    """Read the rows of a Markdown table, dicts by column."""
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
    capsys.readouterr()
    measure.main(["table", "out/plain", "out/tiny", "out/more", "--data", "tiny", "short",
                  "--device", "cpu", "--out", "new/t"])
    said = capsys.readouterr().out
    assert said.endswith(Path("new/t.md").read_text())
    rows = rows_of(said)
    assert [(row["run"], row["steps"], row["seed"], row["layers"]) for row in rows] == [
        ("out/plain", "2", "0", "-"), ("out/tiny", "4", "0", "2/3"),
        ("out/more", "4 + 2", "7", "2/3")]
    found = read("new/t.json")["runs"][1]["results"]
    for name in ("short", "tiny"):
        batches = masked_heldout(Corpus(name), "test", 16, 8)
        expected, _ = evaluate_language_model(load_model("out/tiny"), batches, CPU)
        assert found[name] == json.loads(json.dumps(expected))
        assert rows[1][f"{name} ppl"] == f"{expected['perplexity']:.2f}"
    first, second = expected["layers"].values()
    for column, name, form in (
            ("MU", "mu", ".1%"), ("uniform top-1", "top1_mu_uniform", ".1%"),
            ("KL_w", "kl_w", ".2f"), ("accesses", "accesses", ",.0f")):
        assert rows[1][column] == f"{first[name]:{form}}/{second[name]:{form}}"
        assert rows[0][column] == "-"


def test_runs_that_differ_in_their_seed_alone_share_a_row(runs, capsys):
    train("--max_steps=2", "--memory_layers=", "--out=out/plain_s5", "--seed=5")
    train("--max_steps=2", "--init_from=out/tiny", "--lr=0.5", "--out=out/faster")
    capsys.readouterr()
    measure.main(["table", "out/plain", "out/more", "out/faster", "out/plain_s5", "--data", "tiny",
                  "--device", "cpu", "--out", "t"])
    rows = rows_of(capsys.readouterr().out)
    assert [(row["run"], row["seed"]) for row in rows] == [
        ("out/plain and 1 more", "0 5"), ("out/more", "7"), ("out/faster", "0")]
    assert [row["differs"].split(" lr=")[1] for row in rows] == ["0.003", "0.003", "0.5"]
    assert "memory_layers=[2, 3]" in rows[1]["differs"] and "seed" not in rows[0]["differs"]
    a, b = (run["results"]["tiny"]["perplexity"] for run in read("t.json")["runs"][::3])
    # 12.706 is Student's t of two numbers, whose deviation is their distance / sqrt(2)
    assert rows[0]["tiny ppl"] == f"{(a + b) / 2:.2f} ± {12.706 * abs(a - b) / 2:.2f}"


def write_split(split, texts):
    lines = ["sentence\tlabel", *(f"{text}\tx" for text in texts[1:]), f"{texts[0]}\ty"]
    Path(f"own/{split}.tsv").write_text("\n".join(lines))


@pytest.fixture
def own_task(workdir):
    """Write a fine-tuned run of a task in own/, with 16 slots and 2 heads."""
    bert = helpers.tiny_bert(vocab_size=len(PIECES), memory_layers=(2,), dropout=0.5).bert
    helpers.save_model("out/run/seed0", Classifier(bert.config, 2), ["x", "y"])
    shutil.copy("vocab.txt", "out/run/seed0")
    write_settings("out/run/seed0", task="own", max_len=8, doc_stride=4)
    Run("out/run/seed0").write_results({"metric": "accuracy", "eval_accuracy": 0.5})
    Path("own").mkdir()
    write_split("train", ["cat [SEP]", "mat", "cat " * 20, "the", "sat"])


def table_6(capsys):
    """Make Table 6 of out/run: (task, split, examples) and layer 2's usage, of dev and of train."""
    measure.main(["table", "out/run", "--device", "cpu", "--out", "table6"])
    rows, records = rows_of(capsys.readouterr().out), read("table6.json")
    facts = [(record["task"], record["split"], record["examples"]) for record in records]
    assert facts == [(row["task"], row["split"], int(row["examples"])) for row in rows]
    return facts, [record["layers"]["2"] for record in records]


def test_table_6_is_of_dev_and_of_train(own_task, capsys):
    """Examples have the run's max_len, and a "[SEP]" in a text is three tokens of text."""
    write_split("dev", ["mat"] * 7)  # 3 tokens x 2 heads each
    facts, usage = table_6(capsys)
    assert facts == [("own", "dev", 7), ("own", "train", 5)]
    assert [layer["accesses"] for layer in usage] == [7 * 3 * 2, (3 + 8 + 3 + 3 + 6) * 2]
    assert table_6(capsys)[1] == usage  # dropout is off


def test_table_6_of_squad_is_that_of_all_windows(own_task, capsys):
    """Of 36 tokens: 8 windows with 5 tokens of the question, 10 or in the last 8, and [SEP]."""
    write_settings("out/run/seed0", task="squad", max_len=16, doc_stride=4)
    Path("data/squad").mkdir(parents=True)
    for split in ("dev", "train"):
        helpers.squad_file(Path(f"data/squad/{split}-v1.1.json"))  # two questions
    facts, usage = table_6(capsys)
    assert facts == [("squad", "dev", 16), ("squad", "train", 16)]
    assert [layer["accesses"] for layer in usage] == [2 * 2 * (7 * 16 + 14)] * 2


def shares(counts):
    return [count / sum(counts) for count in counts]


def kl(a, b):
    return sum(p * math.log(p / q) for p, q in zip(a, b, strict=True) if p)


def test_figure_4_and_table_6_slot_by_slot(tuned):
    """Both count what the real tokens of each text read, and no more.

    KL is over the slots that both classes read.
    """
    assert tune("--epochs=1") == 0
    measure.main(["table", "out/tiny_own", "--out", "table6"])
    measure.main(["by_class", "out/tiny_own", "--out", "figure4", "--device", "cpu"])
    assert Path("figure4.png").read_bytes()[1:4] == b"PNG"

    examples = {split: encode_examples(text_tokenizer("tiny.txt"),
                                       *read_split(find_task("own"), split), 32)
                for split in ("train", "dev")}

    def count(path, split):
        """Count layer 2's top-1 reads by class, text by text, which needs no padding."""
        model, counts, reads = load_model(path).eval(), np.zeros((2, 64), int), {}
        tables = value_tables(model)
        with torch.no_grad(), watch_reads(tables, lambda *read: reads.update({read[0]: read[1:]})):
            for example in examples[split]:
                model.bert(torch.from_numpy(example.ids.astype(int))[None])
                slots, _ = reads[2]
                np.add.at(counts[example.label], slots[..., 0].numpy(), 1)
        return counts

    for record, split in zip(read("table6.json"), ("dev", "train"), strict=True):
        counts, usage = count("out/tiny_own", split).sum(0), record["layers"]["2"]
        assert usage["accesses"] == counts.sum()
        assert usage["top1_mu"] == pytest.approx((counts > 0).mean(), abs=0.02)  # one of 64 slots
    records = read("figure4.json")
    assert [(record["when"], record["layer"]) for record in records] == [
        ("before", 2), ("before", 3), ("after", 2), ("after", 3)]
    for record, path in zip(records[::2], ("out/tiny", "out/tiny_own"), strict=True):
        assert (record["run"], record["classes"], record["split"]) == (
            "out/tiny_own", "none against animal", "train")
        animal, none = count(path, "train").tolist()
        both = [(x, y) for x, y in zip(none, animal, strict=True) if x and y]
        assert 10 < len(both) < sum(map(any, zip(none, animal))) < 64
        p, q = shares(none), shares(animal)
        assert record["kl"] == pytest.approx(kl(*map(shares, zip(*both))), abs=0.01)
        iou = sum(map(min, p, q)) / sum(map(max, p, q))
        assert record["iou"] == pytest.approx(iou, abs=0.01)
        assert record["accesses"] == sum(none) + sum(animal)
    for axes, key in zip(pyplot.gcf().axes, ("kl", "iou"), strict=True):
        assert [bar.get_width() for bar in axes.patches] == [record[key] for record in records]


def test_figure_4_needs_the_weights_that_fine_tuning_started_from(tuned):
    assert tune("--max_steps=1") == 0
    shutil.rmtree("out/tiny")
    assert train("--max_steps=4", "--eval_interval=100", "--seed=1") == 0  # the same folder
    with pytest.raises(UserError, match="out/tiny_own started from other weights than out/tiny"):
        measure.main(["by_class", "out/tiny_own"])


def test_the_two_largest_classes():
    examples = [types.SimpleNamespace(label=label) for label in [2] * 9 + [1] * 3 + [0] * 5]
    parts = measure.largest_classes(examples)
    assert [[example.label for example in part] for part in parts] == [[0] * 5, [2] * 9]


def test_the_kl_of_whole_classes_is_of_shared_slots():
    """Both read slots 0 and 1: all of the one class's reads, and half of the other's."""
    found = measure.class_distances(np.array([3, 1, 0, 0]), np.array([1, 1, 2, 0]))
    expected = kl([3 / 4, 1 / 4], [1 / 2, 1 / 2])
    assert found == pytest.approx({"kl": expected, "shared": 3 / 4, "iou": 1 / 3})


def test_figure_2_slot_by_slot(tmp_path, monkeypatch, capsys):
    """A run with fewer snapshots has empty cells."""
    monkeypatch.chdir(tmp_path)
    steps = [500_000, 1_000_000, 1_500_000]  # where names no longer sort by step
    top1 = np.array([[3, 0, 0, 1, 0], [0, 2, 0, 1, 0], [0, 0, 4, 1, 0]])
    for run, snapshots in (("long", 3), ("short", 1)):
        write_settings(run, memory_layers=[2])
        for step, counts in zip(steps[:snapshots], top1):
            Run(run).write_usage(step, {2: {"read": counts, "top1": counts}})
    measure.main(["staleness", "long", "short", "--out", "two"])
    record, _ = read("two.json")
    assert record["slots"] == dict(zip(["never", *map(str, steps)], [0.2, 0.2, 0.2, 0.4]))
    assert (record["layer"], record["accesses"]) == (2, 5)
    assert [row["1500000"] for row in rows_of(capsys.readouterr().out)] == ["40.0%", ""]
    bars = [[bar.get_height() for bar in axes.patches] for axes in pyplot.gcf().axes]
    assert bars == [[20, 20, 20, 40], [60, 40]]


def test_figure_3(runs, capsys):
    """Lines of perplexity and usage. A run that diverged has no numbers."""
    shutil.copytree("out/more", "out/nan")
    records = Run("out/more").records()
    diverged = [record | {"perplexity": None} for record in records if "perplexity" in record]
    Path("out/nan/log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in diverged))
    measure.main(["curves", "out/tiny", "out/more", "out/nan", "--out", "new/three"])
    rows, logs = rows_of(capsys.readouterr().out), read("new/three.json")
    assert [(row["run"], row["steps"]) for row in rows] == [
        ("out/tiny", "4"), ("out/more", "6"), ("out/nan", "6")]
    assert logs["out/more"] == json.loads(json.dumps(Run("out/more").evaluations()))
    assert {path.suffix for path in Path("new").iterdir()} == {".json", ".md", ".png", ".svg"}
    upper, lower = pyplot.gcf().axes
    expected = [[log["step"], log["perplexity"]] for log in logs["out/more"]]
    assert upper.lines[1].get_xydata().tolist() == expected
    last = max(logs[run][-1]["perplexity"] for run in ("out/tiny", "out/more"))
    assert upper.get_ylim()[1] == pytest.approx(2 * last)
    assert [line.get_label() for line in lower.lines][2:4] == ["more, layer 2", "more, layer 3"]
    usage = [100 * log["layers"]["3"]["top1_mu"] for log in logs["out/more"]]
    assert lower.lines[3].get_ydata().tolist() == usage


def finished(folder, task, scores, sha256="a", updated=False, seeds=1, metric=None):
    """Write a run whose medians are `scores`."""
    write_settings(f"{folder}/seed0", task=task, init_from="L", init_sha256=sha256,
                   update_memory=updated)
    medians = {f"eval_{name}": score for name, score in scores.items()}
    results = {"eval_epoch": 2.0, "metric": metric or next(iter(scores)), **medians}
    results["seeds"] = dict.fromkeys(range(seeds), results.copy())
    Path(folder, "eval_results.json").write_text(json.dumps(results))


def test_how_much_longer_the_control_must_train(tmp_path, capsys):
    """Its perplexity falls as steps^-0.5; the memory has that of 2 and 4 times as many steps."""
    runs = [{"run": "out/x", "seed": seed, "own_steps": n, "results": {"text": {
                "perplexity": 100 * (longer * n / 100) ** -0.5, "layers": layers}}}
            for seed, factor in ((0, 2), (1, 4))
            for n, longer, layers in ((100, 1, {}), (300, 1, {}), (900, 1, {}),
                                      (200, factor, {"2": {}}), (800, factor, {"2": {}}))]
    Path(tmp_path / "table.json").write_text(json.dumps({"runs": runs}))
    measure.main(["pays", str(tmp_path / "table.json"), "--out", str(tmp_path / "pays")])
    rows = rows_of(capsys.readouterr().out)
    reach = math.exp(12.706 * math.log(2) / 2)  # Student's factor for two seeds
    middle = 8**0.5
    expected = f"{middle / reach:.2f} to {middle * reach:.2f}"
    assert [[row["N"], row["r(N)"], row["95% interval"]] for row in rows] == [
        ["200", "2.83", expected], ["800", "2.83", expected]]
    assert (tmp_path / "pays.png").exists()
    for wrong in ([*runs, runs[0]], runs[:1] + runs[3:5]):  # twice the same; one length
        Path(tmp_path / "wrong.json").write_text(json.dumps({"runs": wrong}))
        with pytest.raises(UserError, match="one run for each seed and length|two lengths"):
            measure.main(["pays", str(tmp_path / "wrong.json")])


def test_the_table_of_scores(tmp_path, monkeypatch, capsys):
    """A row for a model and memory update, in the order of Table 4 and with its average."""
    monkeypatch.chdir(tmp_path)
    for task, scores in {
            "MNLI": {"accuracy": 0.5, "accuracy_mm": 0.6}, "QQP": {"accuracy": 0.7, "f1": 0.1},
            "QNLI": {"accuracy": 0.8}, "SST-2": {"accuracy": 0.9},
            "CoLA": {"accuracy": 0.3, "matthews_correlation": 0.4},  # an order without a meaning
            "squad": {"f1": 60.5, "exact_match": 50.0}}.items():
        metric = "matthews_correlation" if task == "CoLA" else None
        finished(f"fixed_{task}", task, scores, seeds=5, metric=metric)
    finished("sst2", "SST-2", {"accuracy": 0.95}, updated=True)
    finished("own", "path/to/own", {"pearson": 0.25, "spearmanr": 0.5}, seeds=2)
    own = read("own/eval_results.json")
    own["seeds"]["0"] = {**own["seeds"]["0"], "eval_pearson": None}  # it does not count
    Path("own/eval_results.json").write_text(json.dumps(own))
    Path("unfinished/seed0").mkdir(parents=True)
    paths = sorted(map(str, Path().iterdir()))
    measure.main(["glue", *paths, "--out", "table4"])
    fixed, updated = rows_of(capsys.readouterr().out)
    assert list(fixed.items()) == [
        ("initial model", "L"), ("memory update", "N"), ("squad", "50.0/60.5 (5)"),
        ("mnli", "50.0/60.0 (5)"), ("qqp", "70.0 (5)"), ("qnli", "80.0 (5)"),
        ("sst2", "90.0 (5)"), ("cola", "40.0 (5)"), ("own", "25.0 (1)"), ("Avg", "65.0")]
    assert (updated["memory update"], updated["sst2"], updated["Avg"]) == ("Y", "95.0 (1)", "")
    [squad] = [record for record in read("table4.json") if record["task"] == "squad"]
    assert squad == {"run": "fixed_squad", "initial": "L", "update": False, "task": "squad",
                     "scores": [50, 60.5], "seeds": {seed: [50, 60.5] for seed in "01234"}}
    measure.main(["glue", "own"])
    [row] = rows_of(capsys.readouterr().out)
    assert list(row) == ["initial model", "memory update", "own"]  # no empty column
    measure.main(["glue", *(f"fixed_{task}" for task in ("MNLI", "QQP", "QNLI", "SST-2", "CoLA"))])
    assert rows_of(capsys.readouterr().out)[0]["Avg"] == "65.0"  # without others
    finished("again", "SST-2", {"accuracy": 0.6})
    with pytest.raises(UserError, match="again: .*sst2 from L"):
        measure.main(["glue", *paths, "again"])
    finished("anew", "SST-2", {"accuracy": 0.6}, sha256="b")
    with pytest.raises(UserError, match="anew started from other weights of L"):
        measure.main(["glue", "fixed_QQP", "anew"])


def predict(run, file):
    """Predict for a file. Returns the rows, dicts by column."""
    Path("said.tsv").unlink(missing_ok=True)
    measure.main(["predict", str(run), file, "--out", "said", "--device", "cpu"])
    header, *rows = Path("said.tsv").read_text().removesuffix("\n").split("\n")
    return [dict(zip(header.split("\t"), row.split("\t"), strict=True)) for row in rows]


@torch.no_grad()
def say(run, *texts):
    """Compute the logits of one example, alone and without padding."""
    tokenizer, model = text_tokenizer(run / "vocab.txt"), load_model(run).eval()
    parts = [[*tokenizer.encode(text, add_special_tokens=False).ids, 3] for text in texts]
    ids = [2, *itertools.chain(*parts)]
    types = [int(n > len(parts[0])) for n in range(len(ids))]
    return model(torch.tensor([ids]), token_types=torch.tensor([types]))[0]


def test_predicted_classes_with_probabilities(tuned):
    """Other columns of the file stay."""
    assert tune("--epochs=1") == 0
    run, vocab = Path("out/tiny_own/seed0"), Path("tiny.txt").read_text().split()[5:]
    texts = [" ".join(np.random.default_rng(n).choice(vocab, n)) for n in (5, 1, 30)]
    texts += ["", "a [SEP] cat", "cat " * 30 + "dog " * 30]  # max_len is 32
    Path("new.tsv").write_text("\n".join(["id\tsentence", *(f"7\t{text}" for text in texts)]))
    rows = predict("out/tiny_own", "new.tsv")
    assert list(rows[0]) == ["id", "sentence", "prediction", "probability"]
    for text, row in zip(texts, rows, strict=True):
        label = int(row["prediction"] == "none")
        expected = say(run, " ".join(text.split()[:30])).softmax(0)[label].item()
        assert row["sentence"] == text
        assert expected > 0.4999
        assert float(row["probability"]) == pytest.approx(expected, abs=1e-4)


def test_predicted_answers_with_scores(tuned):
    """Learned by heart, from windows of 24 tokens. Each answer is the best span of all."""
    args = ["--task=squad", "--max_len=24", "--doc_stride=8", "--dropout=0", "--max_steps=60"]
    assert tune(*args) == 0
    run = Path("out/tiny_squad/seed0")
    result = read(run / "eval_results.json")
    assert (result["eval_f1"], result["eval_exact_match"]) == (100, 100)
    assert read(run / "predictions_dev.json") == {"q0": "cat", "q1": "cat"}
    contexts = ["the cat saw", "the dog saw the cat .", ""]
    paragraphs = [{"context": context, "qas": [{"id": context, "question": "no cat ?"}]}
                  for context in contexts]  # questions without answers
    Path("new.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    rows = predict("out/tiny_squad", "new.json")
    assert [row["id"] for row in rows] == contexts
    assert list(rows[2].values()) == ["", "no cat ?", "", "-inf"]
    for context, row in zip(contexts[:2], rows):
        words, (first, *_, last) = context.split(), row["prediction"].split() * 2
        start, end = say(run, "no cat ?", context)[5:-1].T
        best = start[words.index(first)] + end[words.index(last)]
        assert float(row["score"]) == pytest.approx(best.item(), abs=2e-3)


def test_predictions_read_the_columns_of_training(tuned):
    Path("all.tsv").write_text("sentence1\tsentence2\tsentence\nthe cat\tthe dog\tno cat\n")
    Path("half.tsv").write_text("sentence1\nthe cat\n")
    for task in ("own", "pairs"):
        assert tune(f"--task={task}", "--max_steps=1") == 0
    [row], expected = predict("out/tiny_own", "all.tsv"), say(Path("out/tiny_own/seed0"), "no cat")
    assert float(row["probability"]) == pytest.approx(expected.softmax(0).max().item(), abs=1e-3)
    run = Path("out/tiny_pairs/seed0")
    with pytest.raises(UserError, match="half.tsv:1: .*sentence2"):
        predict(run, "half.tsv")
    [row], expected = predict(run, "all.tsv"), say(run, "the cat", "the dog")
    assert float(row["prediction"]) == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize("task, text", [("own", "no cat"), ("pairs", "the cat\tthe dog")])
def test_a_sentence_and_lines_without_a_header_are_predicted(tuned, capsys, task, text):
    """Texts of a pair have a tab between them. A column `prediction` is replaced."""
    assert tune(f"--task={task}", "--max_steps=1") == 0
    run, header = f"out/tiny_{task}", Path(task, "test.tsv").read_text().split("\n")[0]
    Path("table.tsv").write_text(f"{header}\n{text}\n")
    Path("one.txt").write_text(f"{text}\n")
    Path("two.txt").write_text(f"{text}\n{header}\n")  # no header there
    expected = predict(run, "table.tsv")
    assert predict(run, text) == predict(run, "one.txt") == expected
    assert len(predict(run, "two.txt")) == 2
    Path("bare.tsv").write_text(f"{text}\n{text}\n")
    for wrong in ("bare.tsv", "cat", *["no cat"] * (task == "pairs")):
        with pytest.raises(UserError, match=f"^{wrong}:"):
            measure.main(["predict", run, wrong])
    Path("again.tsv").write_text(f"prediction\t{header}\nold\t{text}\n")
    assert predict(run, "again.tsv") == expected


def test_fill_says_what_is_longer_than_training(runs, capsys):
    for words, is_longer in ((13, False), (14, True)):  # 16 tokens with [CLS], [MASK], [SEP]
        measure.main(["fill", "out/plain", "the " * words + "[MASK]"])
        assert ("untrained" in capsys.readouterr().out) == is_longer
