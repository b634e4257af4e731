"""
Pruned memories, against a dense memory in float64 whose dropped rows hold their mean.
"""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import measure
import pretrain
from lib.common.errors import Failure, UserError
from lib.corpus.batches import Corpus, cut_split, masked_heldout
from lib.for_transformers.export import export
from lib.slot_usage.prune import (
    drop_rows,
    find_run,
    memory_bytes,
    prune,
    prune_run,
    with_int8_values,
)
from lib.weights.checkpoint import find_weights, load_model, read_weights
from lib.weights.run import Run
from model import BertConfig, MaskedLM, value_tables
from pkm import PKM, LazyAdam
from tests.helpers import (
    assert_one_line,
    assert_same,
    record_search,
    save_model,
    tiny_bert,
    train,
    tune,
)

CPU = torch.device("cpu")


def dense_mean(table, weight, kept):
    """The whole table with the mean of the dropped rows in their places, row by row in Python."""
    order = sorted(range(len(table)), key=lambda row: (-weight[row], row))
    dropped, total = order[kept:], sum(weight[row] for row in order[kept:])
    mean = sum(weight[row] * table[row] for row in dropped) / total
    return torch.stack([mean if row in dropped else table[row] for row in range(len(table))])


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.1])
def test_a_pruned_model_equals_the_dense_one(keep):
    """Pruned once and twice, with padding and without."""
    model = tiny_bert(memory_layers=(1, 3), init_std=0.5).double().eval()
    counts = {layer: torch.rand(16, dtype=torch.float64) for layer in (1, 3)}
    ids, lengths = torch.randint(40, (5, 12)), torch.tensor([[12], [3], [7], [12], [1]])
    mask = torch.arange(12) < lengths
    pruned = prune(model, counts, keep)
    n_rows = round(16 * keep) + 1
    again_counts = {layer: torch.rand(n_rows, dtype=torch.float64) for layer in (1, 3)}
    again = prune(pruned, again_counts, 0.5)
    for layer, weight in counts.items():
        memory, small = (m.bert.layers[layer - 1].memory for m in (model, pruned))
        kept = round(keep * 16)
        assert len(small.values.weight) == kept + 1
        dense = dense_mean(memory.values.weight.detach(), weight.tolist(), kept)
        memory.values.weight.data = dense
    for given in (None, mask):
        torch.testing.assert_close(pruned(ids, given), model(ids, given), rtol=1e-10, atol=1e-10)
    for layer, weight in again_counts.items():
        memory, small = (m.bert.layers[layer - 1].memory for m in (model, pruned))
        dense = dense_mean(small.values.weight.detach(), weight.tolist(), round(len(weight) / 2))
        memory.values.weight.data = dense[small.slot_rows.long()]
    torch.testing.assert_close(again(ids, mask), model(ids, mask), rtol=1e-10, atol=1e-10)


def test_rows_that_were_never_read_have_a_mean_too():
    values = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    new, became = drop_rows(values, torch.tensor([0.0, 9, 0, 0]).double(), 1)
    assert new.tolist() == [[3, 4], pytest.approx([13 / 3, 16 / 3])]
    assert became.tolist() == [1, 0, 1, 1]


def test_shared_rows_are_updated_like_a_dense_table():
    """A row's gradient is the sum over the slots that share it; the padding moves none."""
    torch.manual_seed(0)
    memory = PKM(6, n_keys=6, heads=2, topk=3, key_dim=4).double()
    memory.share_rows(5)
    memory.double()
    memory.slot_rows = torch.randint(5, (36,), dtype=torch.int32)
    table = memory.values.weight.detach().clone().requires_grad_()
    found = []
    search = memory.search
    memory.search = lambda query: found.append(search(query)) or found[-1]
    mask = torch.arange(7) < torch.tensor([[7], [2]])
    optimizer, dense = LazyAdam([memory.values], lr=0.1), torch.optim.Adam([table], lr=0.1)
    x, weight = torch.randn(2, 2, 7, 6, dtype=torch.float64)
    out = memory(x, mask)
    (out * weight).sum().backward()
    optimizer.step()
    [(slots, weights)] = found
    rows = memory.slot_rows.long()[slots.long()]
    expected = (weights.detach()[..., None] * table[rows]).sum((1, 2))
    torch.testing.assert_close(out[mask], expected)
    (expected * weight[mask]).sum().backward()
    dense.step()
    torch.testing.assert_close(memory.values.weight, table, rtol=0, atol=1e-5)  # lr is 0.1


def test_int8_values_and_their_bytes():
    model = tiny_bert(memory_layers=(2,), n_keys=8).eval()
    model.bert.layers[1].memory.values.weight.data[3] = 0
    half = prune(model, {2: torch.rand(64, dtype=torch.float64)}, 0.5)
    for tested, rows, index in ((model, 64, 0), (half, 33, 64 * 4)):
        assert memory_bytes(tested) == rows * 8 * 4 + index
        assert memory_bytes(tested, int8=True) == rows * (8 + 4) + index
        before, after = (value_tables(m)[2].weight for m in (tested, with_int8_values(tested)))
        scale = before.abs().amax(1, keepdim=True) / 127
        assert ((after - before).abs() <= 0.501 * scale).all() and not after.equal(before)
        levels = after / scale.clamp(min=1e-20)
        assert (levels - levels.round()).abs().max() < 1e-3


def plain_weights(model, ids):
    """Sums of each slot's softmax weights, read by read."""
    calls, sums = record_search(model), {}
    with torch.no_grad():
        model(ids)
    for layer, reads in calls.items():
        sums[layer] = [0.0] * model.bert.config.n_keys**2
        for slots, weights in reads:
            pairs = zip(slots.flatten().tolist(), weights.flatten().tolist(), strict=True)
            for slot, weight in pairs:
                sums[layer][slot] += weight
    return sums


def test_the_curve_and_a_pruned_run(place, capsys):
    """The best read rows of the training text stay. The run is read by all that reads runs."""
    assert train("--max_steps=4", "--eval_interval=100") == 0
    capsys.readouterr()
    measure.main(["prune", "out/tiny", "--keep", "0.5", "1", "0.25", "--device", "cpu"])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()
            if line.startswith("| out/tiny")]
    assert [row[1:3] for row in rows] == [["100.0%", "64"], ["50.0%", "33"], ["25.0%", "17"]]
    assert rows[0][6] == "+0.00%" and not Path("out/pruned").exists()

    records = prune_run("out/tiny", None, [0.25], None, CPU, "out/pruned")
    settings = json.loads(Path("out/pruned/config.json").read_text())
    assert settings["n_rows"] == 17 and settings["pruned_from"] == "out/tiny/step_000004"
    log = Run("out/pruned").evaluations()
    assert log[:-1] == Run("out/tiny").evaluations() and log[-1]["step"] == 4
    assert log[-1]["n_rows"] == 17 and "n_rows" not in log[0]
    whole, small = load_model("out/tiny").eval(), load_model("out/pruned").eval()
    text = [batch["ids"] for batch in masked_heldout(Corpus("tiny"), "train", 16, 8, 4096)]
    sums = plain_weights(load_model("out/tiny").eval(), torch.from_numpy(np.concatenate(text)))
    for layer, weight in sums.items():
        memory = whole.bert.layers[layer - 1].memory
        memory.values.weight.data = dense_mean(memory.values.weight.detach(), weight, 16)
    ids = torch.from_numpy(cut_split(Corpus("tiny"), "test", 16))[:8]
    with torch.no_grad():
        torch.testing.assert_close(small(ids), whole(ids), rtol=1e-4, atol=1e-5)

    measure.main(["table", "out/pruned", "--data", "tiny", "tiny", "--out", "t"])
    table = json.loads(Path("t.json").read_text())
    assert "Usage of out/pruned counts rows of values" in table["note"]
    [run] = table["runs"]
    assert run["results"]["tiny"][0]["perplexity"] == pytest.approx(
        records[-1]["float32_perplexity"], rel=1e-6)
    assert run["steps"] == "4" and records[-1]["rows"] == 17
    measure.main(["report", "out/pruned"])
    measure.main(["slots", "out/pruned", "--layer", "2"])
    shown = capsys.readouterr().out
    whole = Run("out/tiny").evaluations()[-1]["layers"]
    assert f"{whole['2']['top1_mu']:.1%} in layer 2" in shown and whole != log[-1]["layers"]
    assert "8 x 8 slots, which share 17 rows of values, in layers 2 and 3" in shown
    with pytest.raises(UserError, match="no grid of slots"):
        measure.main(["browse", "out/pruned", "--out", "page"])


def test_all_rows_kept_is_the_same_model_bit_for_bit(place, capsys):
    assert train("--max_steps=2") == 0
    [record] = prune_run("out/tiny", "tiny", [1.0], 4, CPU, "out/same")
    before, after = (read_weights(find_weights(run)[0]) for run in ("out/tiny", "out/same"))
    assert_same(before["weights"], after["weights"])
    assert before["config"] == after["config"] and record["rows"] == 64
    assert "wrote out/same: 64 rows a layer" in capsys.readouterr().out


def test_training_from_a_pruned_run(place, capsys):
    """Another run begins with its weights; the pruned one itself cannot go on."""
    assert train("--max_steps=2") == 0
    prune_run("out/tiny", None, [0.5], 4, CPU, "out/pruned")
    assert train("--max_steps=1", "--init_from=out/pruned", "--n_rows=33", "--lr=0", "--value_lr=0",
                 "--out=out/more") == 0
    start, end = (load_model(run).state_dict() for run in ("out/pruned", "out/more"))
    assert_same({n: w for n, w in start.items() if "query_norm" not in n},
                {n: w for n, w in end.items() if "query_norm" not in n})
    lines = [("--n_rows=33", "--max_steps=4", "--out=out/pruned"), "no optimizer.pt"], [
        ("--max_steps=4", "--out=out/pruned"), "n_rows = 33"], [
        ("--init_from=out/pruned", "--out=out/new"), "shape"]
    for arguments, word in lines:
        assert_one_line(capsys, "tiny.py", *arguments, words=[word], main=pretrain.main)


def test_a_pruned_run_is_fine_tuned_and_exported(tuned, capsys):
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    prune_run("out/tiny", None, [0.5], 4, CPU, "out/pruned")
    assert tune("--init_from=out/pruned", "--epochs=1", "--out=out/own") == 0
    assert load_model("out/own").bert.config.n_rows == 33
    for command in ("table", "by_class"):
        measure.main([command, "out/own", "--device", "cpu"])
        assert "Usage of out/own counts rows of values" in capsys.readouterr().out
    export("out/pruned", "exported")
    ids = torch.randint(5, 20, (3, 9))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained("exported", trust_remote_code=True)
    ours, back = (load_model(path).eval() for path in ("out/pruned", "exported"))
    assert theirs.tables[2] is theirs.bert.encoder.layer[1].memory.values
    with torch.no_grad():
        assert back(ids).equal(ours(ids))
        torch.testing.assert_close(theirs.eval()(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_pruned_ends_in_a_line(place, capsys):
    assert train("--max_steps=1") == 0
    assert train("--max_steps=1", "--memory_layers=", "--out=out/plain") == 0
    cases = [(["out/plain", "--keep", "0.5"], "without memory"),
             (["out/tiny", "--keep", "0"], "--keep 0: expected a share"),
             (["out/tiny", "--keep", "1.5"], "--keep 1.5"), (["out/tiny", "--keep", "nan"], "nan"),
             (["out/none", "--keep", "0.5"], "out/none"),
             (["out/tiny", "--keep", "0.5", "--out", "out/plain"], "exists"),
             (["out/tiny", "--keep", "0.5", "0.2", "--out", "out/new"], "one --keep"),
             (["out/tiny", "out/tiny", "--keep", "0.5", "--out", "out/new"], "one run"),
             (["out/tiny", "--keep", "0.5", "--data", "none"], "no such corpus"),
             (["out/tiny", "--keep", "0.5", "--data", "other"], "vocabulary")]
    for arguments, word in cases:
        assert_one_line(capsys, "prune", *arguments, words=[word], main=measure.main)
    Path("data/tiny").rename("data/moved")  # the validation text is evaluated at the very end
    with pytest.raises(UserError, match="data/tiny"):
        find_run("out/tiny", "moved", [0.5], "out/new")


def test_a_run_that_cannot_be_written_leaves_nothing(place, monkeypatch):
    assert train("--max_steps=1") == 0
    before = sorted(Path("out").rglob("*"))

    def full(*arguments):
        raise RuntimeError("unexpected pos 128 vs 64")  # as torch.save

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Failure, match="not saved, is the disk full"):
        prune_run("out/tiny", None, [0.5], 4, CPU, "out/pruned")
    assert sorted(Path("out").rglob("*")) == before


def test_rows_outside_the_table_are_refused(workdir):
    model = tiny_bert(vocab_size=11, memory_layers=(2,), n_rows=5)
    assert model.bert.layers[1].memory.slot_rows.tolist() == [n % 5 for n in range(16)]
    save_model("out/run", model)
    shutil.copy("vocab.txt", "out/run")
    load_model("out/run")
    for step, wrong in ((4, 5), (5, -1)):
        model.bert.layers[1].memory.slot_rows[7] = wrong
        save_model("out/run", model, step=step)
        with pytest.raises(UserError, match="slot_rows is not of rows 0 to 4: damaged"):
            load_model("out/run")


def test_checkpoints_of_before_load(workdir):
    """Their config has no n_rows."""
    save_model("out/run", tiny_bert(vocab_size=11, memory_layers=(2,)))
    shutil.copy("vocab.txt", "out/run")
    file = find_weights("out/run")[0] / "model.pt"
    saved = torch.load(file)
    del saved["config"]["n_rows"]
    torch.save(saved, file)
    assert isinstance(load_model("out/run"), MaskedLM)
    assert read_weights("out/run")["config"] == BertConfig(**saved["config"])
