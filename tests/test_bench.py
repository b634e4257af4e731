"""
bench.py: the baseline computes the same numbers, and every command runs.
"""
import json

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


def test_inference_is_table_1(run):
    result = run("--sizes", "demo", "--lengths", "8")
    assert (result["rounds"], result["ranks"], result["dtype"]) == (2, 1, "float32")
    assert {"command", "machine", "openmp", "torch"} < result.keys()
    records = result["results"]
    assert [record["system"] for record in records] == ["plain", "+PKM", "+ResM"]
    for record in records:
        assert list(record) == ["what", "system", "seconds", "times_plain", "parameters",
                                "batches/s", "relative_batches/s", "paper's"]
        assert record["relative_batches/s"] == 1 / record["times_plain"]
    plain, replaced, added = (record["parameters"] for record in records)
    assert plain < replaced < added


def test_a_layer_is_timed_beside_the_baseline(run):
    records = run("layer", "--tokens", "6", "--n_keys", "32")["results"]
    assert [record["system"] for record in records] == ["plain", "ours", "reads alone",
                                                        "plain", "ours"]
    assert all(record["times_plain"] > 0 for record in records)


def test_causal_models_are_compared_with_the_first_two(configs, run):
    records = run("causal", "causal.py", "causal_resm.py", "--lengths", "8", "16")["results"]
    assert [record["what"] for record in records] == ["inference, 1 x 8"] * 2 + [
        "inference, 1 x 16"] * 2
    assert list(records[1]) == ["what", "system", "seconds", "times_causal.py",
                                "times_causal_resm.py", "parameters"]


def test_latency_by_slots(configs, run):
    records = run("causal", "causal.py", "causal_resm.py", "--slots", "8", "16", "--lengths",
                  "8")["results"]
    assert [record["system"] for record in records] == ["8^2 slots", "16^2 slots"]
    d_model = 64
    more_keys = 4 * 2 * (16 - 8) * 8
    assert records[1]["parameters"] - records[0]["parameters"] == (
        (16**2 - 8**2) * d_model + more_keys)


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
    monkeypatch.setattr(bench, "share_of_peak", lambda *_: 1 / 48)  # of tokens/s
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
