"""
Pretrain: each step by the formulas, where a run starts, what it leaves, and what stops it.
"""
import itertools
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain
from lib.corpus import Corpus, masked_heldout
from lib.run import Run
from lib.settings import Failure, UserError
from lib.training import evaluate_language_model, seed_dropout
from lib.weights import init_from, load_model, model_hash, trained_on
from model import BertConfig, Classifier, LanguageModel, value_tables
from tests.helpers import (
    TINY,
    assert_equal_runs,
    before_update,
    files,
    interrupt,
    log,
    save_model,
    steps_saved,
    tiny_bert,
    train,
)


@pytest.fixture
def float64(monkeypatch):
    """Make everything double, losses too."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def dense_read(table, values, read):
    """Replace a table's lookup by a dense one, whose gradient autograd makes."""
    def forward(slots, weights, dtype=None):
        read.append(slots.flatten().long())
        return (values[slots.long()] * weights[..., None]).sum((1, 2))
    table.forward = forward


def test_three_steps_equal_the_formulas(place, float64):
    """Write each formula out, in float64, beside a run of pretrain.py.

    They are the mean gradient of two micro-batches, clipping, the warm-up, AdamW with Devlin et
    al.'s betas and epsilon, and SparseAdam's update of the rows that were read. Weight decay is on
    matrices outside the memory only.
    """
    settings = {"value_lr": 0.02, "grad_clip": 0.05, "weight_decay": 0.3, "dropout": 0.0,
                "lr": 0.01, "keys_lr": 0.5, "warmup_steps": 4, "max_steps": 8,
                "memory_layers": (2,)}
    config = pretrain.Settings(**{**TINY, **settings})
    corpus = Corpus("tiny")
    torch.manual_seed(0)
    model = LanguageModel(pretrain.bert_config(config, corpus.vocab_size))
    batches = pretrain.MaskedBatches(corpus, config)
    table = value_tables(model)[2]
    values = table.weight.clone().requires_grad_()
    read, moments = [], {}
    dense_read(table, values, read)
    parameters = {n: p for n, p in model.named_parameters() if p is not table.weight}
    parameters["values"] = values
    expected_losses, norms = [], []
    for step in range(3):
        read.clear()
        mean = 0.0
        for micro in range(2):
            arrays, _ = batches.get(step, micro)
            batch = {n: torch.from_numpy(a) for n, a in arrays.items()}
            logits = model(batch["ids"], positions=batch["positions"])
            mean = mean + F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 2
        grads = dict(zip(parameters, torch.autograd.grad(mean, parameters.values(),
                                                         allow_unused=True), strict=True))
        expected_losses.append(mean.item())
        norm = sum(g.square().sum() for n, g in grads.items() if n != "values" and g is not None)
        norms.append(norm.sqrt().item())
        rows = torch.zeros(len(values), 1, dtype=torch.bool)
        rows[torch.cat(read)] = True
        with torch.no_grad():
            for name, grad in grads.items():
                if grad is None:  # the pooler
                    continue
                p, t = parameters[name], step + 1
                if name != "values":
                    grad = grad * 0.05 / (norms[-1] + 1e-6)
                old = moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
                m, v = 0.9 * old[0] + 0.1 * grad, 0.999 * old[1] + 0.001 * grad**2
                first, second = m / (1 - 0.9**t), (v / (1 - 0.999**t)).sqrt()
                if name == "values":  # epsilon before the correction; rows not read stay
                    p -= rows * 0.02 * first / (second + 1e-8 / math.sqrt(1 - 0.999**t))
                    m, v = m.where(rows, old[0]), v.where(rows, old[1])
                else:
                    decay = 0.3 if p.dim() > 1 and ".memory." not in name else 0.0
                    rate = 0.01 * t / 4 * (0.5 if name.endswith(".memory.keys") else 1)
                    p -= rate * (first / (second + 1e-6) + decay * p)
                moments[name] = m, v

    args = [f"--{key}={value}" for key, value in settings.items() if key != "memory_layers"]
    more = ["--memory_layers=2", "--log_interval=1", "--checkpoint_interval=3",
            "--eval_interval=99", "--usage_interval=0"]
    assert train(*args, *more, "--max_steps=8", "--keep_checkpoints=9") == 0
    records = [r for r in log() if "grad_norm" in r][:3]
    assert [r["loss"] for r in records] == pytest.approx(expected_losses, rel=1e-12)
    assert [r["grad_norm"] for r in records] == pytest.approx(norms, rel=1e-9)
    assert min(norms) > 0.05  # clipped
    assert not Path("out/tiny/usage").exists()  # usage_interval = 0
    ours = load_model("out/tiny/step_000003").state_dict()
    for name, p in parameters.items():
        if not name.endswith("query.bias"):  # its gradient is rounding alone, before a batch norm
            other = ours["bert.layers.1.memory.values.weight" if name == "values" else name]
            torch.testing.assert_close(other, p.detach(), rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("alpha, reinit_ffn", [(1.0, False), (0.0, False), (1.0, True)],
                         ids=["ResM", "PKM", "ResM'"])
def test_init_from(tmp_path, capsys, alpha, reinit_ffn):
    trained = tiny_bert(seed=1)
    initial = save_model(tmp_path / "run", trained)
    model = tiny_bert(memory_layers=(2,), alpha=alpha)
    fresh = {name: w.clone() for name, w in model.state_dict().items()}
    origin = init_from(model, initial, reinit_ffn)
    assert origin == {"init_checkpoint": str(initial), "init_sha256": model_hash(initial),
                      "init_memory": {}, "first_step": 3, "pooler_trained": False,
                      "trained_on": trained_on(initial)}
    for name, w in model.state_dict().items():
        ffn = name.startswith(("bert.layers.1.up", "bert.layers.1.down"))
        is_fresh = "memory" in name or reinit_ffn and ffn
        assert torch.equal(w, (fresh if is_fresh else trained.state_dict())[name]), name
    said = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert f"new {'down, memory, up' if reinit_ffn else 'memory'}" in said
    assert f"dropped {'down, up' if alpha == 0 else 'nothing'}" in said


def test_seeds_share_no_random_pooler(tmp_path):
    """Draw a pooler that masked language modelling did not train. A Classifier trains it."""
    initial = save_model(tmp_path / "run", tiny_bert(seed=1))

    def pooler(seed, start=initial):
        torch.manual_seed(seed)
        model = Classifier(tiny_bert().bert.config, 2)
        torch.manual_seed(seed)
        for p in model.parameters():
            torch.nn.init.normal_(p)
        init_from(model, start)
        return model.bert.pooler.weight

    assert not torch.equal(pooler(0), pooler(1)) and torch.equal(pooler(0), pooler(0))
    tuned = Classifier(tiny_bert().bert.config, 2)
    start = save_model(tmp_path / "tuned", tuned)
    assert torch.equal(pooler(0, start), tuned.bert.pooler.weight)
    other = Classifier(tuned.bert.config, 2)
    init_from(other, start)
    assert not torch.equal(other.head.weight, tuned.head.weight)


def test_values_that_start_at_0_change_no_output(place):
    """Start a new memory at 0, but keep the values of one that was trained before."""
    for initial, layers in (("plain", ""), ("with", "2")):
        out = f"out/{initial}"
        assert train(f"--out={out}", f"--memory_layers={layers}", "--max_steps=3") == 0
        for values in ("zero", "random"):
            assert train(f"--out={out}_{values}", "--max_steps=1", f"--init_from={out}",
                         f"--init_values={values}") == 0
        last = [r["perplexity"] for r in log(out) if "perplexity" in r][-1]
        assert log(f"{out}_zero")[0]["perplexity"] == last
        assert log(f"{out}_random")[0]["perplexity"] != last


def test_a_run_leaves_what_it_promises(place):
    args = ["--checkpoint_interval=3", "--warmup_steps=4"]
    assert train(*args) == 0
    run, records = Path("out/tiny"), log()
    assert [r["step"] for r in records if "grad_norm" in r] == [3, 6, 9, 12]
    evaluations = [r for r in records if "perplexity" in r]
    assert [r["step"] for r in evaluations] == [0, 1, 2, 4, 6, 12]
    assert all(list(r["layers"]) == ["2", "3"] for r in evaluations)
    assert 20 < evaluations[0]["perplexity"] < 30  # untrained, 25 tokens
    assert evaluations[-1]["perplexity"] < evaluations[0]["perplexity"] - 0.5
    held_out = masked_heldout(Corpus("tiny"), "val", 16, 2, 8)  # eval_sequences = 8
    results, _ = evaluate_language_model(load_model("out/tiny"), held_out, torch.device("cpu"))
    assert evaluations[-1]["perplexity"] == results["perplexity"]
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "log.jsonl", "step_000009",
                                                     "step_000012", "usage", "vocab.txt"]
    saved = json.loads((run / "config.json").read_text())
    assert saved["memory_layers"] == [2, 3] and saved["lr"] == 3e-3
    assert saved["pooler_trained"] is False  # each seed of fine-tuning draws its own
    assert sorted(os.listdir(run / "usage")) == ["step_000006.npz", "step_000012.npz"]
    for name, counts in np.load(run / "usage" / "step_000012.npz").items():
        assert name in {f"layer{n}_{what}" for n in (2, 3) for what in ("read", "top1")}
        topk = 4 if name.endswith("read") else 1
        assert counts.shape == (64,) and counts.sum() == 8 * 16 * 2 * topk  # tokens, heads
    before = files()
    assert train(*args) == 0 and files() == before  # the end was reached
    with pytest.raises(UserError, match="add --dtype=float32 to go on"):
        train("--max_steps=14", "--dtype=bfloat16")
    assert files() == before


def test_a_logged_loss_is_the_mean_since_the_last(place, monkeypatch):
    """Log the time of the steps alone.

    This clock moves by 1 whenever the loop reads it twice: at steps 1 to 5 (saved), 6 and 9.
    """
    args = "--max_steps=9", "--warmup_steps=4"
    assert train(*args, "--out=out/losses", "--log_interval=1", "--eval_interval=1000") == 0
    every = np.array([r["loss"] for r in log("out/losses") if "grad_norm" in r])
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    train(*args)
    records = [r for r in log() if "grad_norm" in r]
    assert [r["loss"] for r in records] == pytest.approx(every.reshape(3, 3).mean(1))
    assert [r["elapsed"] for r in records] == [3, 6, 7]
    assert [r["tokens_per_s"] for r in records] == [64, 64, 192]  # a step has 2 x 2 x 16 tokens


@pytest.mark.parametrize("number, at, objective", [
    (signal.SIGINT, 1, "masked"), (signal.SIGTERM, 8, "causal"), (signal.SIGTERM, 12, "masked")])
def test_a_signal_saves_and_the_run_goes_on(place, capsys, number, at, objective):
    with before_update(at, interrupt(number)):
        status = train("--out=out/a b", f"--objective={objective}")
    assert status == (128 + number if at < 12 else 0)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second Ctrl-C ends the process
    assert steps_saved("out/a b") == at
    said = "python pretrain.py tiny.py '--out=out/a b'" if at < 12 else "done, "
    assert said in capsys.readouterr().out
    assert train("--out=out/a b", f"--objective={objective}") == 0
    assert train("--out=out/whole", f"--objective={objective}") == 0
    assert_equal_runs("out/a b", "out/whole", 0.0)


def test_a_loss_that_is_no_number_is_not_saved(place):
    def leap(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e30

    assert train("--max_steps=4", "--checkpoint_interval=2") == 0
    before = files("out/tiny/step_000004")
    with before_update(2, leap), pytest.raises(Failure, match="^step 7: "):  # 2 after step 4
        train("--checkpoint_interval=100")
    assert files("out/tiny/step_000004") == before and steps_saved("out/tiny") == 4


def test_settings_reach_the_model():
    """Override the named model's sizes. A new width has its own spread of weights."""
    sizes = {"n_layer": 2, "n_head": 3, "d_model": 192, "d_ff": 48, "dropout": 0.3,
             "memory_layers": (2,), "alpha": 0.5, "beta": 2.0, "n_keys": 8, "memory_heads": 2,
             "topk": 4, "key_dim": 6}
    expected = sizes | {"causal": False, "init_std": 0.04}  # 0.02 x (768 / 192)^0.5
    found = pretrain.bert_config(pretrain.Settings(model="base", **sizes), 99)
    assert found == BertConfig(vocab_size=99, **expected)
    assert pretrain.bert_config(pretrain.Settings()) == BertConfig()
    named = pretrain.bert_config(pretrain.Settings(model="large", objective="causal"))
    assert named == BertConfig(n_layer=24, n_head=16, d_model=1024, d_ff=4096, causal=True)


def test_a_seed_draws_its_own_weights_and_no_snapshot_is_left_out(place, monkeypatch):
    first = []
    for number, seed in enumerate((0, 1, 1)):
        assert train(f"--seed={seed}", "--max_steps=1", f"--out=out/{number}") == 0
        first.append(log(f"out/{number}")[0]["perplexity"])
    assert first[0] != first[1] == first[2]
    seeds = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", seeds.append)
        assert train("--seed=3", "--max_steps=2", "--out=out/3") == 0
    for number, key in enumerate(itertools.product([3], range(2), range(2)), 1):
        seed_dropout(*key)
        assert seeds[number] == torch.initial_seed()
    assert seeds[0] == 3 and len(seeds) == 5  # of the weights, and of 2 x 2 micro-batches
    long = [f"--{name}_interval=100" for name in ("log", "eval", "checkpoint")]
    assert train("--max_steps=7", "--usage_interval=3", "--device=auto", *long) == 0
    assert Run("out/tiny").settings()["device"] != "auto"
    assert [r["step"] for r in log() if "perplexity" in r] == [0, 1, 2, 3, 4, 6, 7]
    assert sorted(os.listdir("out/tiny/usage")) == [f"step_00000{n}.npz" for n in (3, 6, 7)]
