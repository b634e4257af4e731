"""
bench.py: the baseline computes the same numbers, and every command runs.
"""
import json
from statistics import median

import pytest
import torch

import bench
import pkm
from lib.errors import UserError
from model import value_tables
from tests.helpers import assert_near

SMALL = """
model = "demo"
n_keys = 32
topk = 8
key_dim = 16
seq_len = 16
batch_size = 2
accumulation = 3
max_steps = 7200
warmup_steps = 1
"""


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder with the configs plain.py, resm.py, causal.py and causal_resm.py."""
    memory = "memory_layers = (2,)\n"
    causal = 'objective = "causal"\n'
    for name, more in (("plain", ""), ("resm", memory), ("causal", causal),
                       ("causal_resm", causal + memory)):
        (tmp_path / f"{name}.py").write_text(SMALL + more)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run bench.py. Returns the JSON of its last line."""
    def run(*args):
        bench.main([*args, "--rounds=2", "--device=cpu"])
        return json.loads(capsys.readouterr().out.splitlines()[-1])
    return run


def test_the_layer_equals_the_plain_baseline():
    """Ratios compare two ways to the same numbers: outputs, gradients, updates by SparseAdam."""
    torch.manual_seed(0)
    ours = pkm.PKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain = bench.PlainPKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain.load_state_dict(ours.state_dict())
    sparse_adam = torch.optim.SparseAdam([plain.values.weight.requires_grad_()], lr=0.01)
    lazy_adam = pkm.LazyAdam([ours.values], lr=0.01)
    for _ in range(3):
        x, weight = torch.randn(2, 300, 16)
        outputs = [model(x) for model in (ours, plain)]
        for output in outputs:
            (output * weight).sum().backward()
        assert_near(*outputs, 1e-6)
        assert_near(ours.keys.grad, plain.keys.grad, 1e-5)
        assert_near(ours.query.weight.grad, plain.query.weight.grad, 1e-5)
        sparse_adam.step()
        lazy_adam.step()
        for to_clear in (ours, lazy_adam, plain):
            to_clear.zero_grad()
        assert_near(ours.values.weight, plain.values.weight, 1e-5)


@torch.no_grad()
def test_flat_keys_find_the_best_slots():
    """Brute force, a score at a time, over all 25 slots."""
    torch.manual_seed(0)
    memory = bench.FlatPKM(pkm.ValueTable(25, 16), 16, 2, 4, 8).double().eval()
    x = torch.randn(7, 16, dtype=torch.double)
    query = memory.query_norm(memory.query(x)).view(7, 2, 8)
    expected = torch.zeros_like(x)
    for token in range(7):
        for head in range(2):
            scores = [float(query[token, head] @ key) for key in memory.keys[head]]
            best = sorted(range(25), key=scores.__getitem__)[-4:]
            weights = torch.tensor([scores[slot] for slot in best]).double().softmax(0)
            expected[token] += weights @ memory.values.weight[best]
    assert_near(memory(x), expected, 1e-6)


def test_flat_keys_of_all_pairs_equal_product_keys():
    torch.manual_seed(0)
    product = pkm.PKM(16, 5, 2, 4, 8).eval()
    flat = bench.FlatPKM(product.values, 16, 2, 4, 8).eval()
    first, second = product.keys.unbind(1)
    keys = [torch.cat([first[:, i], second[:, j]], 1) for i in range(5) for j in range(5)]
    flat.load_state_dict({**product.state_dict(), "keys": torch.stack(keys, 1)})
    query = torch.randn(300, 16)
    (slots, weights), (expected, expected_weights) = flat.search(query), product.search(query)
    assert torch.equal(slots, expected)
    assert_near(weights, expected_weights, 1e-6)


def test_inference_is_table_1(run):
    result = run("--sizes", "demo", "--lengths", "8")
    assert (result["ranks"], result["dtype"]) == (1, "float32")
    assert {"command", "machine", "openmp", "torch"} < result.keys()
    records = result["results"]
    assert [record["system"] for record in records] == ["demo", "demo +PKM", "demo +ResM"]
    for record in records:
        assert list(record) == ["what", "system", "seconds", "times_demo", "parameters",
                                "batches/s", "relative_batches/s"]
        assert record["batches/s"] == 1 / median(record["seconds"])
        assert record["relative_batches/s"] == 1 / record["times_demo"]
    plain, replaced, added = (record["parameters"] for record in records)
    assert plain < replaced < added


def test_a_layer_is_timed_beside_the_baseline(run):
    records = run("layer", "--lengths", "6", "--n_keys", "32")["results"]
    assert [record["system"] for record in records] == ["plain", "ours", "plain", "ours"]
    assert all(record["times_plain"] > 0 for record in records)


def test_causal_models_are_compared_with_the_first_two(configs, run):
    records = run("causal", "causal.py", "causal_resm.py", "--lengths", "8", "16")["results"]
    assert [record["what"] for record in records] == ["inference, 1 x 8"] * 2 + [
        "inference, 1 x 16"] * 2
    assert list(records[1]) == ["what", "system", "seconds", "times_causal.py",
                                "times_causal_resm.py", "parameters"]


def test_latency_by_slots(configs, run, monkeypatch):
    time_inference, seen = bench.time_inference, {}

    def remember(args, models, *more, **others):
        seen.update(models)
        return time_inference(args, models, *more, **others)

    monkeypatch.setattr(bench, "time_inference", remember)
    records = run("causal", "causal.py", "causal_resm.py", "--slots", "8", "16", "--lengths",
                  "8")["results"]
    assert [record["system"] for record in records] == [
        "product keys, 8^2 slots", "flat keys, 8^2 slots",
        "product keys, 16^2 slots", "flat keys, 16^2 slots"]
    topk, key_dim, heads, d_model = 8, 16, 4, 64
    assert [record["multiplications"] for record in records] == [
        (8 + topk**2) * key_dim, 8**2 * key_dim, (16 + topk**2) * key_dim, 16**2 * key_dim]
    keys = [8 * key_dim, 8**2 * key_dim, 16 * key_dim, 16**2 * key_dim]
    slots = [8**2, 8**2, 16**2, 16**2]
    rest = {record["parameters"] - heads * key - n * d_model
            for record, key, n in zip(records, keys, slots, strict=True)}
    assert len(rest) == 1
    product, flat = seen["product keys, 8^2 slots"].bert, seen["flat keys, 8^2 slots"].bert
    assert product.words.weight is flat.words.weight
    product, flat = product.layers[1].memory, flat.layers[1].memory
    assert [type(product), type(flat)] == [pkm.PKM, bench.FlatPKM]
    assert product.values.weight is flat.values.weight


def test_settings_that_would_be_ignored_are_refused():
    with pytest.raises(UserError, match="unknown argument: --seq_len=8"):
        bench.main(["causal", "--seq_len=8"])


def test_rates_are_of_the_median_step(configs, run, monkeypatch):
    """Steps of 96 tokens take 2, 4 and 9 seconds, then twice as long."""
    factors = iter([1, 2])

    def time_in_turn(what, functions, *more, **others):
        factor = next(factors)
        [name] = functions
        seconds = [2.0 * factor, 9.0 * factor, 4.0 * factor]
        return [{"what": what, "system": name, "seconds": seconds}]

    monkeypatch.setattr(bench, "time_in_turn", time_in_turn)
    monkeypatch.setattr(bench.training, "share_of_peak", lambda *_: 1 / 48)  # of tokens/s
    first, second = run("train", "plain.py", "resm.py")["results"]
    assert (first["what"], first["tokens/s"], first["mfu"]) == ("3 x 2 x 16", 24, 0.5)
    assert (first["hours"], second["hours"]) == (8, 16)  # of 7,200 steps
    assert (first["times_the_first"], second["times_the_first"]) == (1, 2)


@pytest.mark.parametrize("config", ["resm.py", "causal_resm.py"])
def test_a_step_trains(configs, run, monkeypatch, config):
    """It moves weights, keys and values, and leaves nothing for the next step."""
    build, models, before = bench.build, [], {}

    def remember(*args):
        models.append(build(*args))
        before.update({name: w.clone() for name, w in models[0].state_dict().items()})
        return models[0]

    monkeypatch.setattr(bench, "build", remember)
    run("train", config, "--accumulation=1")
    [model] = models
    after = model.state_dict()
    memory = "bert.layers.1.memory"
    for name in "bert.words.weight", f"{memory}.keys", f"{memory}.values.weight":
        assert not torch.equal(before[name], after[name])
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not value_tables(model)[2].pending
