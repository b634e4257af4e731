"""
bench.py: the baseline computes the same numbers, and every command times what it should.
"""
import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import bench
import pkm
from lib.settings import load_settings
from lib.training import count_parameters, prepare, step
from lib.weights import load_model
from model import LanguageModel
from pretrain import Settings, bert_config
from tests.helpers import assert_near, train

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
    """Write the configs plain.py, resm.py, causal.py and causal_resm.py."""
    memory, causal = "memory_layers = (2,)\n", 'objective = "causal"\n'
    for name, more in (("plain", ""), ("resm", memory), ("causal", causal),
                       ("causal_resm", causal + memory)):
        (tmp_path / f"{name}.py").write_text(SMALL + more)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run bench.py. Returns the records of its last line."""
    def run(*args):
        bench.main([*args, "--rounds=2", "--device=cpu"])
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]

    return run


@pytest.fixture
def clock(monkeypatch):
    """Set the durations in seconds of what is timed from now on."""
    def set_durations(*durations):
        moments = itertools.accumulate(step for seconds in durations for step in (0, seconds))
        monkeypatch.setattr("time.perf_counter", lambda: next(moments))

    return set_durations


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


def test_inference_is_table_1(run, monkeypatch):
    """If models are compiled, they are timed eager, too."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled.append(model) or model)
    records = run("inference", "--sizes", "demo", "--lengths", "8")
    assert [record["system"] for record in records] == ["demo", "demo +PKM", "demo +ResM"]
    assert not any(record["compiled"] for record in records) and not compiled
    for record in records:
        assert record["batches/s"] == 1 / median(record["seconds"])
        assert record["relative_batches/s"] == 1 / record["times_demo"]
        # demo: transform and its norm, bias of the words; a classifier has two outputs
        head = 64 * 64 + 3 * 64 + 30522 - (2 * 64 + 2)
        assert record["mlm_parameters"] == record["parameters"] + head
    plain, replaced, added = (record["parameters"] for record in records)
    assert plain < replaced < added
    both = run("inference", "--sizes", "demo", "--lengths", "8", "--compile=on")
    assert [(record["system"], record["compiled"]) for record in both] == [
        (record["system"], mode) for mode in (False, True) for record in records]
    assert [len(model.bert.config.memory_layers) for model in compiled] == [0, 2, 2]


def test_a_layer_is_timed_beside_the_baseline(run):
    records = run("layer", "--lengths", "6", "--keys", "32")
    assert [record["system"] for record in records] == ["plain", "ours", "plain", "ours"]


def test_causal_models_are_compared_with_the_first_two(configs, run):
    records = run("causal", "causal.py", "causal_resm.py", "--lengths", "8", "16")
    assert [record["what"] for record in records] == ["inference, 1 x 8"] * 2 + [
        "inference, 1 x 16"] * 2
    assert records[0]["times_causal.py"] == records[1]["times_causal_resm.py"] == 1


def test_latency_by_slots(configs, run, monkeypatch):
    """Product keys and flat keys of a size share the values, and all outside the memory."""
    models = []
    monkeypatch.setattr(torch, "compile", lambda model, **_: models.append(model) or model)
    records = run("causal", "causal.py", "causal_resm.py", "--slots", "8", "16", "--lengths", "8",
                  "--compile=on")
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
    for product, flat in (models[:2], models[2:]):
        kinds = [type(model.bert.layers[1].memory) for model in (product, flat)]
        assert kinds == [pkm.PKM, bench.FlatPKM]
        of_flat = dict(flat.named_parameters())
        own = [name for name, p in product.named_parameters() if of_flat[name] is not p]
        assert "bert.layers.1.memory.keys" in own
        assert all(".memory." in name and "values" not in name for name in own)


def test_all_other_settings_are_the_configs(configs, run, monkeypatch):
    [small], [large] = run("train", "resm.py"), run("train", "resm.py", "--n_keys=64")
    assert large["parameters"] - small["parameters"] == (64**2 - 32**2) * 64 + 4 * (64 - 32) * 16
    given, passed = [f"--{field.name}={field.default}" for field in fields(Settings)], []
    monkeypatch.setitem(bench.COMMANDS, "train", lambda args: passed.extend(args.settings) or [])
    run("train", *given)
    assert {word[2:].partition("=")[0] for word in {*given} - {*passed}} == {
        "batch_size", "accumulation", "device", "dtype", "compile"}


@pytest.mark.parametrize("vocab_size, changes", [  # most memory is for:
    (1000, "--batch_size=16 --accumulation=1 --d_model=128 --d_ff=512"),  # layers
    (1000, "--n_keys=128"),  # values
    (1000, "--accumulation=80 --batch_size=1 --topk=32"),  # reads, and the values' update
    (4000, "--objective=causal --memory_layers="),  # the head
    (1000, "--memory_layers= --d_model=256 --d_ff=1024 --batch_size=6")])  # dense weights
def test_memory_is_computed_before_it_is_taken(vocab_size, changes):
    """Against the profiler's sum of what torch allocates and frees, in two updates."""
    settings = load_settings(Settings, [
        "--model=demo", "--memory_layers=2,3", "--n_keys=32", "--topk=8", "--key_dim=32",
        "--seq_len=64", "--batch_size=2", "--accumulation=3", "--device=cpu", "--dtype=float32",
        *changes.split()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = LanguageModel(bert_config(settings, vocab_size))
        net, optimizers, _ = prepare(model, settings)
        for number in range(2):
            step(number, net, bench.RandomBatches(vocab_size, settings), optimizers, settings)
    changes = sorted((event.start_ns(), event.nbytes()) for event in
                     profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    peak = max(itertools.accumulate(size for _, size in changes))
    assert peak == pytest.approx(
        bench.memory_needed(model.bert.config, settings, count_parameters(model)), rel=0.15)


def test_rates_are_of_the_median_step(configs, run, clock):
    """Steps of 96 tokens take 2 and 6 seconds, then 4 and 12, after two that do not count."""
    clock(50, 50, 2, 6, 50, 50, 4, 12)
    first, second = run("train", "plain.py", "resm.py")
    assert (first["what"], first["tokens/s"]) == ("3 x 2 x 16", 24)
    assert (first["hours"], second["hours"]) == (8, 16)  # of 7,200 steps
    assert (first["times_the_first"], second["times_the_first"]) == (1, 2)
    clock(50, 50, 2, 2)
    [small] = run("train", "plain.py", "--accumulation", "1", "--batch_size=1", "--max_steps=3600")
    assert (small["what"], small["tokens/s"], small["hours"]) == ("1 x 1 x 16", 8, 12)


def test_a_model_is_the_runs(place, run):
    """Its vocabulary is the corpus's, its sizes those of the initial model."""
    assert train("--max_steps=1", "--memory_layers=", "--n_layer=2") == 0
    expected = count_parameters(load_model("out/tiny"))
    [record] = run("train", "tiny.py", "--model=", "--init_from=out/tiny", "--memory_layers=")
    assert record["parameters"] == expected


def test_times_are_of_the_timed_rounds_and_ratios_of_the_same_round(clock, capsys):
    clock(50, 50, 2, 1, 3, 1, 8, 2)
    slow, fast = bench.time_in_turn("work", {"slow": list, "fast": list}, torch.device("cpu"),
                                    rounds=3, warmup=1)
    assert slow == {"what": "work", "system": "slow", "seconds": [2, 3, 8], "times_slow": 1}
    assert fast["seconds"] == [1, 1, 2]
    assert fast["times_slow"] == 1 / 3  # of 1/2, 1/3 and 1/4
    bench.print_times([slow, fast])
    table = capsys.readouterr().out
    assert "3 [2, 8] s" in table
    assert "1 [1, 2] s" in table
    bench.print_times([{"seconds": [0.25, 0.5, 2]}])
    assert "500 [250, 2000] ms" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_is_in_bytes():
    [kilobytes] = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    assert bench.peak_bytes(torch.device("cpu")) == pytest.approx(1024 * int(kilobytes), rel=0.1)
