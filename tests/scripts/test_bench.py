"""
bench.py: the baselines compute the same numbers, and every comparison runs.
"""
import json
import sys

import pytest
import torch

import bench
import pkm
from lib.errors import UserError, run_main
from tests.helpers import assert_near


def test_the_layer_equals_the_plain_baseline():
    """bench.py's ratios compare two ways to the same numbers: outputs, gradients, SparseAdam."""
    torch.manual_seed(0)
    ours = pkm.PKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain = bench.PlainPKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain.load_state_dict(ours.state_dict())
    sparse_adam = torch.optim.SparseAdam(plain.values.parameters(), lr=0.01)
    lazy_adam = pkm.LazyAdam([ours.values], lr=0.01)
    for _ in range(3):
        x, weight = torch.randn(2, 300, 16)  # more than backward takes at once
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


@pytest.mark.parametrize("args", [
    ["--sizes", "demo", "--lengths", "8"], ["layer", "--tokens", "6"],
    ["train", "--size", "demo", "--length", "16", "--batch_size", "2"],
    ["causal", "--size", "demo", "--layers", "4", "--lengths", "8", "--length", "16"],
    ["causal", "--slots", "32", "33", "--size", "demo", "--layers", "4", "--lengths", "8"],
    ["against_transformers", "--size", "demo", "--lengths", "8", "--length", "16"]],
    ids=lambda args: " ".join(args[:2]))
def test_bench(monkeypatch, capsys, args):
    if "against_transformers" in args:
        pytest.importorskip("transformers")
    monkeypatch.setitem(bench.SIZES, "base", bench.SIZES["demo"])  # of layer
    n_keys = [] if "against_transformers" in args else ["--n_keys", "32"]
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(sys, "argv", ["bench.py", *args, "--rounds", "2", *n_keys])
    bench.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["results"] and record["rounds"] == 2 and record["dtype"] == "float32"
    names = [r["system"] for r in record["results"]]
    if "--slots" in args:
        assert names == ["32^2 slots", "33^2 slots"]
    elif args[0] == "causal":
        assert names == ["4 layers", "8 layers", "4 layers, memory"] * 2
    elif args[0] in ("--sizes", "train"):
        assert names == ["plain", "+PKM", "+ResM"]
    elif args[0] == "layer":
        assert names == ["plain", "ours", "reads alone", "plain", "ours"]
    else:
        assert names == ["theirs", "ours"] * 2


def run_train(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["bench.py", "train", "--size", "demo", "--length", "16",
                                      "--rounds", "1", "--n_keys", "32", *args])
    bench.main()


def test_compiled_training(monkeypatch, capsys):
    compiled = []

    def compile_without_inductor(model):
        compiled.append(model)
        return torch_compile(model, backend="aot_eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    run_train(monkeypatch, "--compile", "on", "--batch_size", "2", "--systems", "+ResM")
    torch._dynamo.reset()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(compiled) == len(record["results"]) == 1


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")])
def test_out_of_memory_is_one_line(monkeypatch, capsys, error):
    def training_step(*args, **more):
        def step():
            raise error
        return step

    monkeypatch.setattr(bench, "training_step", training_step)
    with pytest.raises(SystemExit) as end:
        run_main(lambda: run_train(monkeypatch, "--batch_size", "8"))
    error = capsys.readouterr().err
    assert end.value.code == 1 and "Take a smaller batch_size" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_rates_are_of_the_median_round(monkeypatch, capsys):
    """Rounds of 2, 4 and 9 seconds, half as fast as plain BERT; two ranks of 2 x 16 tokens."""
    records = [{"system": system, "seconds": [2.0, 9.0, 4.0], "times_plain": 2.0}
               for system in ("plain", "+PKM", "+ResM")]
    monkeypatch.setattr(bench, "compare", lambda *args, **more: [dict(r) for r in records])
    monkeypatch.setattr(bench, "get_world_size", lambda: 2)

    def results(*args):
        monkeypatch.setattr(sys, "argv", ["bench.py", *args, "--n_keys", "32"])
        bench.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]

    for record in results("--sizes", "demo", "--lengths", "8"):
        assert (record["batches/s"], record["relative_batches/s"]) == (1 / 4, 1 / 2)
    found = results("train", "--size", "demo", "--length", "16", "--batch_size", "2")
    assert [(r["tokens"], r["tokens/s"]) for r in found] == [(64, 16)] * 3


def test_the_reads_are_compared_with_a_copy(monkeypatch, capsys):
    """6 tokens read 4 x 32 rows of 64 float32 numbers in 4 seconds; the device copies 1,024 B/s."""
    def compare(args, what, calls, **more):
        calls["reads alone" if "forward" in what else "ours"]()  # it works
        return [{"what": what, "system": name, "seconds": [2.0, 9.0, 4.0]} for name in calls]

    monkeypatch.setitem(bench.SIZES, "base", bench.SIZES["demo"])
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1024.0)
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["bench.py", "layer", "--tokens", "6", "--n_keys", "32"])
    bench.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    shares = [record.get("of_copy_bandwidth") for record in results]
    assert shares == [6 * 4 * 32 * 64 * 4 / 4 / 1024] * 3 + [None] * 2


@pytest.mark.parametrize("device, asked, compiles", [
    ("cpu", "auto", False), ("cuda", "auto", True), ("cpu", "on", True), ("cuda", "off", False)])
def test_compile_is_on_by_default_only_on_cuda(monkeypatch, device, asked, compiles):
    seen = []
    monkeypatch.setattr(bench, "choose_device",
                        lambda *_: (torch.device(device), torch.float32, ""))
    monkeypatch.setattr(bench, "machine_facts", lambda device: {})
    monkeypatch.setattr(bench, "train", lambda args: seen.append(args.compile) or [])
    bench.train.__name__, bench.train.__doc__ = "train", "A step"
    monkeypatch.setattr(sys, "argv", ["bench.py", "train", "--compile", asked])
    bench.main()
    assert seen == [compiles]


def test_the_papers_speeds_are_those_of_its_table_1():
    """Batches/s of BERT, PKM and ResM."""
    for size, plain, replaced, added in (("base", 79.8, 61.4, 59.3), ("large", 43.1, 37.2, 36.1)):
        assert bench.TABLE_1[size, "+PKM"] == pytest.approx(replaced / plain)
        assert bench.TABLE_1[size, "+ResM"] == pytest.approx(added / plain)


def test_what_is_timed_is_inference_and_training(monkeypatch):
    """Inference without gradients and dropout. A step moves weights and values, with dropout."""
    args = bench.parse(["train", "--size", "demo", "--n_keys", "32"])
    args.device, args.dtype = torch.device("cpu"), torch.float32
    model, seen = bench.build(args, None, "demo", "+ResM"), []
    model.register_forward_hook(
        lambda module, *more: seen.append((module.training, torch.is_grad_enabled())))
    ids = bench.random_ids(args, 2, 8)
    bench.forward(args, model.train(), ids)()
    before = [p.clone() for p in (model.bert.words.weight, *(
        table.weight for table in bench.value_tables(model).values()))]
    bench.training_step(args, model.train(), lambda: model(ids, labels=ids))()
    after = [model.bert.words.weight, *(t.weight for t in bench.value_tables(model).values())]
    assert seen == [(False, False), (True, True)]
    assert len(after) == 3 and not any(map(torch.equal, before, after))
    modes, step = [], bench.training_step
    monkeypatch.setattr(bench, "training_step", lambda args, model, *more, **others: (
        modes.append(model.training), step(args, model, *more, **others))[1])
    monkeypatch.setattr(sys, "argv", ["bench.py", "causal", "--size", "demo", "--layers", "2",
                                      "--lengths", "8", "--length", "8", "--n_keys", "32",
                                      "--rounds", "1", "--batch_size", "1"])
    bench.main()
    assert modes == [True] * 3


@pytest.mark.parametrize(("args", "words"), [
    (["layer", "--tokens", "1"], "'1': expected a whole number, at least 2"),
    (["train", "--length", "1", "--batch_size", "1"], "a batch norm needs two tokens")])
def test_one_token_has_no_batch_statistics(monkeypatch, args, words):
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    with pytest.raises(UserError, match=words):
        bench.main()


def test_sequences_of_one_token(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "train", "--size", "demo", "--length", "1",
                                      "--batch_size", "2", "--n_keys", "32", "--rounds", "1",
                                      "--systems", "+ResM"])
    bench.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"]


def test_float16_training_is_refused(monkeypatch):
    monkeypatch.setattr("bench.choose_device",
                        lambda *_: (torch.device("cpu"), torch.float16, "float16"))
    with pytest.raises(UserError, match="timed in float32 and bfloat16"):
        run_train(monkeypatch)
