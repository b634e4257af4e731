"""
Pretraining: where it starts and what it leaves. No kill, signal or full disk changes that.

$ PKM_TEST_KILLS=20 python -m pytest -k killed      # more SIGKILLs than 5
"""
import collections
import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pretrain
from lib.corpus import Corpus, MaskedBatches
from lib.errors import Failure, UserError
from lib.run import Run
from lib.training import State, Trainer, flops_per_token, optimizer_groups, peak_flops, to_device
from lib.weights import init_from, load_model
from model import Classifier, SpanReader, value_tables
from tests.helpers import (
    KILLS,
    ROOT,
    TINY,
    assert_same,
    command,
    files,
    log,
    save_model,
    steps_saved,
    tiny_bert,
    train,
)


def test_optimizer_groups():
    model = tiny_bert(memory_layers=(2, 3))
    decayed, others = optimizer_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3 and others["weight_decay"] == 0
    found = collections.Counter(id(p) for group in (decayed, others) for p in group["params"])
    for name, p in model.named_parameters():
        assert found.pop(id(p), 0) == (0 if name.endswith("values.weight") else 1), name
        if "norm" in name or name.endswith("bias") or ".memory." in name:
            assert not any(p is q for q in decayed["params"]), name
        elif not name.endswith("values.weight"):
            assert not any(p is q for q in others["params"]), name
    assert not found


def test_sub_keys_learn_at_their_own_rate(place):
    """A factor of the schedule's rate, also in a resumed run; 1 is the run without the setting."""
    def keys(*args):
        assert train("--max_steps=3", "--checkpoint_interval=2", *args) == 0
        weights = load_model(args[0].removeprefix("--out=")).state_dict()
        return [w for name, w in weights.items() if name.endswith(".memory.keys")]

    plain, one = keys("--out=out/plain"), keys("--out=out/one", "--keys_lr=1.0")
    frozen, slow = keys("--out=out/frozen", "--keys_lr=0"), keys("--out=out/slow", "--keys_lr=.1")
    torch.manual_seed(0)
    config = pretrain.Config(**TINY)
    start, _ = pretrain.make_model(config, Corpus("tiny"), None)
    first = [w for name, w in start.state_dict().items() if name.endswith(".memory.keys")]
    assert len(first) == 2
    for n, initial in enumerate(first):
        assert torch.equal(plain[n], one[n]) and torch.equal(frozen[n], initial)
        assert 0.05 < (slow[n] - initial).norm() / (plain[n] - initial).norm() < 0.2
    shutil.rmtree("out/slow/step_000003")
    assert all(map(torch.equal, keys("--out=out/slow", "--keys_lr=.1"), slow))
    with pytest.raises(UserError, match="keys_lr = 0.1, not 1.0"):
        train("--out=out/slow", "--max_steps=4")


def test_values_that_start_at_0_change_no_output(place):
    """At the start of a new memory; one that was trained before keeps its values."""
    def logits(init_from, values):
        torch.manual_seed(0)
        config = pretrain.Config(**TINY | {"init_from": init_from, "values": values})
        model, _ = pretrain.make_model(config, Corpus("tiny"), None)
        return model.eval()(torch.arange(5, 25)[None])

    assert train("--out=out/plain", "--memory_layers=", "--max_steps=3") == 0
    expected = load_model("out/plain").eval()(torch.arange(5, 25)[None])
    assert torch.equal(logits("out/plain", "zero"), expected)
    assert not torch.equal(logits("out/plain", "random"), expected)
    assert train("--out=out/with", "--max_steps=3") == 0
    assert torch.equal(logits("out/with", "zero"), logits("out/with", "random"))


def test_a_run_from_before_a_setting_existed_goes_on(place):
    def forget(key):
        settings = json.loads(config.read_text())
        del settings[key]
        config.write_text(json.dumps(settings))

    assert train("--out=out/old", "--max_steps=2") == 0
    config = Path("out/old/config.json")
    forget("values")
    with pytest.raises(UserError, match="values = 'random', not 'zero'"):
        train("--out=out/old", "--max_steps=3", "--values=zero")
    assert train("--out=out/old", "--max_steps=3") == 0
    forget("memory_heads")  # whose default, 4, is not tiny.py's
    with pytest.raises(UserError, match="memory_heads = 4, not 2"):
        train("--out=out/old", "--max_steps=4")


def test_a_memory_without_query_norm(place):
    """The setting reaches the memory, its checkpoint and whatever loads it."""
    assert train("--query_norm=False", "--max_steps=2") == 0
    model = load_model("out/tiny")
    assert not [name for name in model.state_dict() if "query_norm" in name]
    assert train("--out=out/norm", "--max_steps=2") == 0
    assert [r["loss"] for r in log()][-1] != [r["loss"] for r in log("out/norm")][-1]
    assert train("--query_norm=False", "--max_steps=3") == 0


@pytest.mark.parametrize("memory", [{}, {"memory_layers": (2,)},
                                    {"memory_layers": (2, 3), "alpha": 0.0}])
def test_flops_are_torchs_count(memory):
    model = tiny_bert(max_len=20, **memory)
    ids, positions = torch.zeros(2, 20, dtype=torch.long), torch.tensor([[1, 5, 9]] * 2)  # 15%
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, positions=positions, labels=positions).backward()
    assert flops_per_token(model, 20) == pytest.approx(counter.get_total_flops() / 40)


@pytest.mark.parametrize("card, peak", [
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA L4", 121e12),
    ("NVIDIA L40S", None), ("NVIDIA GeForce RTX 4090", 165e12)])
def test_peak_flops_of_a_card(monkeypatch, card, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


class TwoBatches:
    """Two micro-batches a step, of random tokens."""

    accumulation, size, unit = 2, 2, "examples"

    def loss_weight(self, step, micro):
        return 0.5

    def get(self, step, micro):
        rng = np.random.default_rng([step, micro])
        return {"ids": rng.integers(40, size=(3, 10)), "labels": rng.integers(40, size=(3, 10))}


def test_two_steps_equal_the_formulas():
    """Each formula is written out here, in float64: the mean gradient, clipping, the warm-up, AdamW
    with Devlin et al.'s betas and epsilon, and SparseAdam's update of the rows that were read.
    Weight decay is on matrices outside the memory only."""
    config = pretrain.Config(value_lr=0.02, grad_clip=0.05, weight_decay=0.3, dropout=0.0, lr=0.01,
                             warmup_steps=4, max_steps=8)
    model = tiny_bert(memory_layers=(2,), dropout=0.0).double()
    ours = copy.deepcopy(model)
    trainer = Trainer(config, ours, TwoBatches(), torch.device("cpu"), torch.float32)
    moments = {}
    for step in range(2):
        loss, norm = trainer.step(step)
        table = model.bert.layers[1].memory.values
        rows, values = [], nn.Parameter(table.weight.detach().clone())
        table.forward = lambda slots, weights, dtype, values=values, rows=rows: (
            rows.append(slots), (values[slots.long()] * weights[..., None]).sum((1, 2)))[1]
        model.zero_grad()
        losses = []
        for micro in range(2):
            batch = to_device(trainer.batches.get(step, micro), torch.device("cpu"))
            logits = model(batch["ids"])
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
            (losses[-1] / 2).backward()
        assert loss.item() == pytest.approx((sum(losses) / 2).item(), rel=1e-6)
        dense = {n: p for n, p in model.named_parameters() if p is not table.weight}
        total = sum((p.grad**2).sum() for p in dense.values() if p.grad is not None)
        assert norm.item() == pytest.approx(total.sqrt().item(), rel=1e-6) and norm > 0.05
        lr = 0.01 * (step + 1) / 4
        with torch.no_grad():
            for name, p in [*dense.items(), ("values", values)]:
                if p.grad is None:  # the pooler
                    continue
                grad = p.grad if name == "values" else p.grad * 0.05 / (norm + 1e-6)
                m, v = moments.get(name, (0.0, 0.0))
                m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
                mean, square = m / (1 - 0.9**(step + 1)), v / (1 - 0.999**(step + 1))
                if name == "values":  # epsilon before the correction; rows not read stay
                    size = 0.02 * mean / (square.sqrt() + 1e-8 / math.sqrt(1 - 0.999**(step + 1)))
                    read = torch.zeros(len(p), 1).index_fill(0, torch.cat(rows).flatten().long(), 1)
                    moments[name] = [torch.where(read > 0, new, old) for new, old in
                                     zip((m, v), moments.get(name, (0 * m, 0 * v)), strict=True)]
                    table.weight -= size * read
                else:
                    decay = 0.3 if p.dim() > 1 and ".memory." not in name else 0.0
                    p -= lr * (mean / (square.sqrt() + 1e-6) + decay * p)
                    moments[name] = (m, v)
        for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=0, atol=1e-7, msg=f"step {step}: {name}")


def test_dropout_is_a_function_of_seed_and_step():
    """Every step and every seed have another dropout. A resumed run has the same one again."""
    def losses(seed, steps):
        config = pretrain.Config(seed=seed, value_lr=0.0, lr=0.0, warmup_steps=0, max_steps=9)
        trainer = Trainer(config, tiny_bert(dropout=0.5), batches, torch.device("cpu"),
                          torch.float32)
        return [trainer.step(step)[0].item() for step in steps]

    batches = TwoBatches()
    batches.get = lambda step, micro: TwoBatches.get(batches, 0, 0)  # always the same one
    found = losses(0, range(3))
    assert len({*found, *losses(1, range(3))}) == 6
    assert losses(0, [2]) == found[2:]


@pytest.fixture
def plain_run(tmp_path):
    """A run with one checkpoint of a model without memory."""
    model = tiny_bert(seed=1)
    return model.state_dict(), save_model(tmp_path / "run", model)


@pytest.mark.parametrize("alpha, reinit_ffn", [(1.0, False), (0.0, False), (1.0, True)],
                         ids=["ResM", "PKM", "ResM'"])
def test_init_from(plain_run, capsys, alpha, reinit_ffn):
    trained, initial = plain_run
    model = tiny_bert(memory_layers=(2,), alpha=alpha)
    random_weights = {name: w.clone() for name, w in model.state_dict().items()}
    init_from(model, initial, reinit_ffn)
    for name, w in model.state_dict().items():
        fresh = "memory" in name or reinit_ffn and name.startswith(("bert.layers.1.up",
                                                                    "bert.layers.1.down"))
        assert torch.equal(w, (random_weights if fresh else trained)[name]), name
    assert ("bert.layers.1.up.weight" in model.state_dict()) == bool(alpha)
    said = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    ffn = 8 * 16 * 2 + 8 + 16
    memory = 16 * 8 + 2 * 2 * 4 * 2 + 8 * 8 + 8 + 2 * 8  # values, keys, query, its norm
    expected = {f"left random memory {memory} parameters layers 2"}
    if alpha and not reinit_ffn:
        expected |= {f"loaded FFN {3 * ffn} parameters layers 1, 2, 3"}
    else:
        expected |= {f"loaded FFN {2 * ffn} parameters layers 1, 3",
                     f"{'left random' if alpha else 'dropped'} FFN {ffn} parameters layers 2"}
    assert said >= expected


def test_init_from_another_shape(plain_run):
    with pytest.raises(UserError, match="shape"):
        init_from(tiny_bert(d_model=12), plain_run[1])
    with pytest.raises(UserError, match="has n_head = 2, this model 4: give --n_head=2"):
        init_from(tiny_bert(n_head=4), plain_run[1])


def test_seeds_share_no_random_pooler(plain_run):
    """Masked-LM pretraining and SQuAD leave the pooler as it was drawn. A Classifier trains it."""
    (_, initial), sizes = plain_run, tiny_bert().bert.config

    def pooler(seed, start=initial):
        torch.manual_seed(seed)
        model = Classifier(sizes, 2)
        init_from(model, start)
        return model.bert.pooler.weight

    assert not torch.equal(pooler(0), pooler(1)) and torch.equal(pooler(0), pooler(0))
    tuned = Classifier(sizes, 2)
    start = save_model(initial.parent / "tuned", tuned)
    assert torch.equal(pooler(0, start), tuned.bert.pooler.weight)
    vocab = initial.parent / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe")
    for before, trained in ((initial, False), (start, True)):
        model = SpanReader(sizes)
        origin = init_from(model, before)
        reader = save_model(initial.parent / f"squad_{trained}", model)
        Run(reader.parent).begin(pretrain.Config(), vocab, origin, {})
        shutil.rmtree(before)  # a run knows it without its ancestors
        assert torch.equal(pooler(0, reader), pooler(1, reader)) == trained


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_a_model_keeps_one_copy(tmp_path):
    """Writing to the model leaves the file as it was."""
    model = tiny_bert(memory_layers=(2,), n_keys=512, d_model=64)  # 67 MB of values
    file = save_model(tmp_path, model) / "model.pt"
    before = hashlib.sha256(file.read_bytes()).digest()
    code = ("import sys, lib.weights as checkpoint\n"
            "def kb(): return next(int(line.split()[1]) for line in open('/proc/self/status') "
            "if line.startswith('VmHWM'))\n"
            "start = kb(); loaded = checkpoint.load_model(sys.argv[1]); peak = kb() - start\n"
            "for p in loaded.parameters(): p.data.zero_()\n"
            "print(peak)")
    peak = subprocess.run([sys.executable, "-c", code, str(file.parent)], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout
    assert int(peak) < 1.3 * file.stat().st_size / 1024
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert_same(dict(load_model(file.parent).state_dict()), dict(model.state_dict()))


def test_a_run_leaves_what_it_promises(place, capsys):
    args = ["--checkpoint_interval=3", "--warmup_steps=4"]
    assert train(*args) == 0
    run, records = Path("out/tiny"), log()
    assert [r["step"] for r in records if "grad_norm" in r] == [3, 6, 9, 12]
    evaluations = [r for r in records if "perplexity" in r]
    assert [r["step"] for r in evaluations] == [0, 1, 2, 4, 6, 12]
    assert all({"1", "4"}.isdisjoint(r["layers"]) and len(r["layers"]) == 2 for r in evaluations)
    assert 20 < evaluations[0]["perplexity"] < 30  # untrained, 25 tokens
    assert evaluations[-1]["perplexity"] < evaluations[0]["perplexity"] - 0.5
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "log.jsonl", "step_000009",
                                                     "step_000012", "usage", "vocab.txt"]
    saved = json.loads((run / "config.json").read_text())
    assert saved["memory_layers"] == [2, 3] and saved["lr"] == 3e-3
    assert sorted(os.listdir(run / "usage")) == ["step_000006.npz", "step_000012.npz"]
    for name, counts in np.load(run / "usage" / "step_000012.npz").items():
        assert name in {f"layer{n}_{what}" for n in (2, 3) for what in ("read", "top1")}
        topk = 4 if name.endswith("read") else 1
        assert counts.shape == (64,) and counts.sum() == 8 * 16 * 2 * topk  # tokens, heads
    before = files()
    assert train(*args) == 0 and files() == before  # the end was reached
    assert train(*args, "--eval_only=True") == 0 and files() == before
    assert f"perplexity {evaluations[-1]['perplexity']:.2f}" in capsys.readouterr().out
    with pytest.raises(UserError, match="add --dtype=float32 to go on"):
        train("--max_steps=14", "--dtype=bfloat16")
    assert train(*args, "--eval_only=True", "--dtype=bfloat16") == 0 and files() == before
    assert train("--out=out/new", "--dry_run=True") == 0 and files() == before
    with pytest.raises(UserError, match="out/new: no checkpoint to evaluate"):
        train("--out=out/new", "--eval_only=True")
    assert files() == before
    for checkpoint in run.glob("step_*"):
        shutil.rmtree(checkpoint)
    before = files()
    with pytest.raises(UserError, match="its log has 12 steps, but no checkpoint is left"):
        train(*args)
    assert files() == before


def losses(*args):
    """The loss of every step of a fresh run."""
    shutil.rmtree("out/losses", ignore_errors=True)
    assert train("--out=out/losses", "--log_interval=1", "--eval_interval=1000", *args) == 0
    return np.array([r["loss"] for r in log("out/losses") if "grad_norm" in r])


def test_accumulation_is_one_larger_batch(place, monkeypatch):
    """Without memory, whose batch norm sees a micro-batch, and without dropout."""
    get, results = MaskedBatches.get, []
    whole = MaskedBatches(Corpus("tiny"), pretrain.Config(
        seq_len=16, batch_size=4, accumulation=1))
    for size in (4, 2, 1):
        monkeypatch.setattr(MaskedBatches, "get", lambda self, step, micro, size=size: {
            name: part[size * micro:size * (micro + 1)]
            for name, part in get(whole, step, 0).items()})
        losses("--memory_layers=", "--dropout=0", "--max_steps=3", f"--batch_size={size}",
               f"--accumulation={4 // size}")
        results.append([r[key] for r in log("out/losses") for key in ("loss", "grad_norm")
                        if key in r])
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert results[2] == pytest.approx(results[0], rel=1e-4)


def test_a_logged_loss_is_the_mean_since_the_last(place):
    args = "--max_steps=9", "--warmup_steps=4"
    every = losses(*args)
    train(*args)
    means = [r["loss"] for r in log() if "grad_norm" in r]
    assert means == pytest.approx(every.reshape(3, 3).mean(1))
    lrs = [r["lr"] for r in log("out/losses") if "grad_norm" in r]
    assert lrs == pytest.approx([min((n + 1) / 4, (9 - n) / 5) * 3e-3 for n in range(9)])


def test_speed_is_since_the_last_record_and_elapsed_since_the_start(place, monkeypatch):
    """On this clock a step takes a second. Evaluations and checkpoints take no time."""
    clock, step = [0.0], Trainer.step

    def second(trainer, n):
        clock[0] += 1
        return step(trainer, n)

    monkeypatch.setattr(Trainer, "step", second)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    train("--max_steps=12", "--log_interval=3", "--checkpoint_interval=2", "--eval_interval=4")
    records = [r for r in log() if "grad_norm" in r]
    assert [r["elapsed"] for r in records] == [3, 6, 9, 12]
    assert {r["tokens_per_s"] for r in records} == {2 * 2 * 16}


def test_what_a_killed_process_left_half_written_goes(place):
    assert train("--max_steps=2") == 0
    Path("out/tiny/.tmp_step_000009").mkdir()
    Path("out/tiny/usage/.tmp_step_000009.npz").write_text("half")
    assert train("--max_steps=3") == 0
    assert not list(Path("out").rglob(".tmp_*"))
    Path("out/new").mkdir()  # killed before its first checkpoint: all begins anew
    Path("out/new/log.jsonl").write_text('{"step": 1, "lr": 0.1}\n{"step": 2, "lo')
    assert train("--max_steps=1", "--out=out/new") == 0
    assert [r["step"] for r in log("out/new") if "perplexity" in r] == [0, 1]


def test_compiled_training_equals_eager(place):
    """The value_lr is so high that values which a compiled graph forgot to train would show."""
    args = ["--n_layer=2", "--memory_layers=1,2", "--dropout=0", "--max_steps=20",
            "--accumulation=1", "--value_lr=0.03"]
    eager, compiled = losses(*args), losses(*args, "--compile=on")
    frozen = losses(*args, "--value_lr=0")
    torch._dynamo.reset()
    assert len(eager) == 20 and abs(eager - compiled).max() < 1e-3
    assert abs(eager - frozen).max() > 1e-2
    assert (eager != compiled).any()  # it was another program


def test_bfloat16_follows_float32(place):
    args = ["--max_steps=50", "--dropout=0"]
    full, half = losses(*args), losses(*args, "--dtype=bfloat16")
    assert (full != half).any()
    assert abs(half[-10:].mean() / full[-10:].mean() - 1) < 0.02


def test_float16_skips_a_step_that_overflows(place):
    """If the scaler finds an inf, nothing moves and the reads go. The next step is unscaled."""
    config = pretrain.Config(**{**TINY, "dropout": 0.0})
    corpus, device = Corpus("tiny"), torch.device("cpu")
    model, _ = pretrain.make_model(config, corpus, None)
    batches = MaskedBatches(corpus, config)
    trainer = Trainer(config, model, batches, device, torch.float16)
    before = {name: w.clone() for name, w in model.state_dict().items() if "running" not in name}
    scale, backward = trainer.scaler.get_scale(), torch.Tensor.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", lambda self: backward(self * math.inf))
        trainer.step(0)
    after = model.state_dict()
    assert all(torch.equal(w, after[name]) for name, w in before.items() if "tracked" not in name)
    assert trainer.scaler.get_scale() == scale / 2
    tables = value_tables(model).values()
    assert not trainer.value_optimizer.state and not any(table.reads for table in tables)
    full, _ = pretrain.make_model(config, corpus, None)
    full.load_state_dict(after)
    other = Trainer(config, full, batches, device, torch.float32)
    norms = [t.step(1)[1].item() for t in (trainer, other)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)  # clipped after it was unscaled
    moments = [t.value_optimizer.state.values() for t in (trainer, other)]
    for half, single in zip(*moments, strict=True):
        ratio = half["exp_avg"].norm() / single["exp_avg"].norm()  # near a tie slots may differ
        assert 0.9 < ratio < 1.1 and ratio != 1  # unscaled: not 32,768 times as large


def assert_same_run(out, reference):
    """The logs are the same but for speed; weights and moments are the same at the end."""
    def timeless(run):
        return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "elapsed")}
                for r in log(run)]

    assert_same(timeless(out), timeless(reference), "log")
    ends = [Run(run).newest_checkpoint() for run in (out, reference)]
    assert ends[0].name == ends[1].name
    for name in ("model.pt", "optimizer.pt"):
        assert_same(*(torch.load(end / name, weights_only=True) for end in ends), name)
    values = torch.load(ends[0] / "optimizer.pt", weights_only=True)["values"]
    assert len(values["state"]) == 2
    assert all(v["exp_avg_sq"].abs().sum() > 0 for v in values["state"].values())


def wait_for(condition, process):
    """Poll until condition() is true, and return its value. The process must not end before."""
    while not (value := condition()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    return value


def saving(run):
    """Whether the newest checkpoint still lacks its last file, under any name."""
    newest = max(run.glob("*step_*"), key=lambda path: path.name[-6:])
    return (newest / "model.pt").exists() and not (newest / "state.pt").exists()


def test_a_killed_run_ends_as_if_it_had_not_been(place):
    """Half of the kills come during a step, the others while a checkpoint is written."""
    args = ["--eval_interval=4", f"--max_steps={20 + 6 * KILLS}"]
    rng, run, seen = random.Random(), Path("out/killed"), 0  # other moments every time
    for number in range(KILLS):
        with subprocess.Popen(command(*args, "--out=out/killed", "--checkpoint_interval=1"),
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            first = wait_for(lambda seen=seen: max(0, steps_saved(run) - seen), process) + seen
            start = time.perf_counter()
            wait_for(lambda first=first: steps_saved(run) > first, process)
            time.sleep(rng.random() * (time.perf_counter() - start))  # somewhere in a step
            if number % 2:
                wait_for(lambda: saving(run), process)
                time.sleep(rng.random() * 0.003)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        seen = steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS
    assert train(*args, "--out=out/killed", "--checkpoint_interval=1") == 0
    assert train(*args, "--out=out/whole", "--checkpoint_interval=1000") == 0
    assert_same_run(run, "out/whole")
    assert not list(run.rglob(".tmp_*"))


@pytest.mark.parametrize("number, at, objective", [
    (signal.SIGINT, 1, "masked"), (signal.SIGTERM, 1, "masked"), (signal.SIGINT, 8, "masked"),
    (signal.SIGTERM, 8, "causal"), (signal.SIGUSR1, 8, "masked"), (signal.SIGUSR1, 12, "masked")])
def test_a_signal_saves_and_the_run_goes_on(place, monkeypatch, capsys, number, at, objective):
    step = Trainer.step

    def interrupted(trainer, n):
        if n == at - 1:
            os.kill(os.getpid(), number)
        return step(trainer, n)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        status = train("--out=out/a b", f"--objective={objective}")
    assert status == (128 + number if at < 12 else 0)
    assert steps_saved("out/a b") == at
    said = "python pretrain.py tiny.py '--out=out/a b'" if at < 12 else "done, "
    assert said in capsys.readouterr().out
    assert train("--out=out/a b", f"--objective={objective}") == 0
    assert train("--out=out/whole", f"--objective={objective}") == 0
    assert_same_run("out/a b", "out/whole")


def test_a_second_signal_of_a_scheduler_does_not_stop_the_saving(place, monkeypatch):
    """SLURM may send SIGUSR1 and then SIGTERM; only Ctrl-C quits at once."""
    save = Trainer.save

    def interrupted(trainer, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        return save(trainer, *args)

    monkeypatch.setattr(Trainer, "save", interrupted)
    monkeypatch.setattr(Trainer, "step", lambda self, n, step=Trainer.step: (
        os.kill(os.getpid(), signal.SIGUSR1), step(self, n))[1])
    assert train() == 128 + signal.SIGUSR1 and steps_saved("out/tiny") == 1


def test_a_loss_that_is_no_number_stops_the_run(place, monkeypatch):
    assert train("--max_steps=4", "--checkpoint_interval=2") == 0
    before = files("out/tiny/step_000004")
    rate = Trainer.learning_rate
    monkeypatch.setattr(Trainer, "learning_rate",
                        lambda self, n: 1e30 if n == 5 else rate(self, n))
    with pytest.raises(Failure, match="^step 7: the loss is (nan|inf)"):
        train("--checkpoint_interval=100")
    assert files("out/tiny/step_000004") == before and steps_saved("out/tiny") == 4


@pytest.mark.parametrize("loss, norm, dtype, stops", [
    (1.0, 1.0, torch.float32, False), (math.nan, 1.0, torch.float32, True),
    (1.0, math.inf, torch.float32, True), (1.0, math.inf, torch.bfloat16, True),
    (1.0, math.inf, torch.float16, False), (math.inf, 1.0, torch.float16, True)])
def test_a_loss_or_norm_that_is_no_number_stops(loss, norm, dtype, stops):
    """In float16 a norm may overflow: the scaler skips that step. A loss may not overflow."""
    steps = [(1.0, 0.5), (loss, norm), (1.0, 0.5)]
    trainer = Trainer(pretrain.Config(), tiny_bert(), TwoBatches(), torch.device("cpu"), dtype)
    with pytest.raises(Failure, match="step 8") if stops else contextlib.nullcontext():
        trainer.check_finite(9, steps)


def test_a_gradient_that_is_no_number_is_not_saved(place, monkeypatch):
    """The loss of its step is fine, but the weights after it are not."""
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, n: clip(p, n) * math.nan)
    with pytest.raises(Failure, match="^step 1: "):
        train("--checkpoint_interval=1")
    assert not list(Path("out/tiny").glob("*step_*"))


@pytest.mark.parametrize("file, share", [("model.pt", 0.02), ("model.pt", 0.5),
                                         ("optimizer.pt", 0.9)])
def test_no_space_left(place, file, share):
    """The disk takes files up to this share of the named one."""
    assert train("--max_steps=4") == 0
    before = files("out/tiny/step_000004")
    limit = int(share * len(before[f"out/tiny/step_000004/{file}"]))
    result = subprocess.run(
        command("--max_steps=6"), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert files("out/tiny/step_000004") == before and steps_saved("out/tiny") == 4
    assert train("--max_steps=6") == 0


def test_micro_batches_of_a_step_have_their_own_dropout():
    """Two equal micro-batches have two losses."""
    config = pretrain.Config(value_lr=0.0, lr=0.0, warmup_steps=0, max_steps=9)
    batches, losses, model = TwoBatches(), [], tiny_bert(dropout=0.5)
    batches.get = lambda step, micro: TwoBatches.get(batches, 0, 0)
    model.register_forward_hook(lambda module, args, loss: losses.append(loss.item()))
    Trainer(config, model, batches, torch.device("cpu"), torch.float32).step(0)
    assert len(losses) == len(set(losses)) == 2


def test_a_checkpoint_gives_back_state_and_scale(tmp_path):
    """The time and the losses since the last record, the best epoch, and the scaler's scale."""
    def trainer():
        return Trainer(pretrain.Config(), tiny_bert(), TwoBatches(), torch.device("cpu"),
                       torch.float16)

    first, again = trainer(), trainer()
    first.scaler.scale(torch.ones(1))  # it has a scale from here on
    first.scaler.update(8.0)
    state = State(step=3, elapsed=7.0, seconds=2.0, losses=[1.5], best={"epoch": 2},
                  last={"epoch": 3})
    first.save(Run(tmp_path), state)
    assert again.restore(tmp_path / "step_000003") == state
    assert first.scaler.get_scale() == again.scaler.get_scale() == 8


def test_a_record_and_its_line(tmp_path, monkeypatch, capsys):
    """Six steps of 2 examples, a second each, on a card of 8 GFLOP/s that a model of 1 GFLOP an
    example uses to a quarter; on each of four, to a sixteenth."""
    monkeypatch.setattr("lib.training.peak_flops", lambda device: 8e9)
    for ranks in (1, 4):
        monkeypatch.setattr("lib.training.get_world_size", lambda ranks=ranks: ranks)
        clock, records, batches = [0.0], [], TwoBatches()
        batches.epochs = lambda steps: steps / 4

        def step(n, clock=clock):
            clock[0] += 1
            return torch.tensor(n + 1.0), torch.tensor(10.0 * (n + 1))

        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: clock[0])
        config = pretrain.Config(max_steps=6, warmup_steps=0, lr=0.6)
        trainer = Trainer(config, tiny_bert(), batches, torch.device("cpu"), torch.bfloat16, 1e9)
        trainer.step, run = step, Run(tmp_path)
        run.log = records.append
        trainer.train(run, State(), lambda n: {"log"} if n % 3 == 0 else set(), None, [])
        assert records == [pytest.approx(
            {"step": n, "epoch": n / 4, "loss": n - 1, "lr": (7 - n) / 10, "grad_norm": 10 * n,
             "examples_per_s": 2, "elapsed": n, "mfu": 0.25 / ranks}) for n in (3, 6)]
        assert "step 3/6 | epoch 0.75 | loss 2.0000 | 2 examples/s | mfu" in (
            lines := capsys.readouterr().out)
        assert re.findall(r"eta (\S+)", lines) == ["0:00:03", "0:00:00"]


def test_settings_reach_the_model():
    """Also where they are not the named model's. A new width has its own spread of weights."""
    config = pretrain.Config(
        model="base", n_layer=2, n_head=3, d_model=192, d_ff=48, dropout=0.3, memory_layers=(2,),
        alpha=0.5, beta=2.0, n_keys=8, memory_heads=2, topk=4, key_dim=6, query_norm=False,
        n_rows=7)
    sizes = {"n_layer": 2, "n_head": 3, "d_model": 192, "d_ff": 48, "dropout": 0.3,
             "memory_layers": (2,), "alpha": 0.5, "beta": 2.0, "n_keys": 8, "memory_heads": 2,
             "topk": 4, "key_dim": 6, "query_norm": False, "n_rows": 7, "causal": False,
             "init_std": 0.04}
    assert pretrain.model_sizes(config) == sizes  # 0.02 x (768 / 192)^0.5
    named = pretrain.model_sizes(pretrain.Config(model="large"))
    assert [named[key] for key in ("n_layer", "n_head", "d_model", "d_ff")] == [24, 16, 1024, 4096]
    assert "init_std" not in named


def test_a_seed_draws_its_own_weights(place):
    """Before the first step already."""
    first = []
    for number, seed in enumerate((0, 1, 1)):
        assert train(f"--seed={seed}", "--max_steps=1", f"--out=out/{number}") == 0
        first.append(log(f"out/{number}")[0]["perplexity"])
    assert first[0] != first[1] == first[2]


def test_a_model_starts_where_its_settings_say(place):
    """With reinit_ffn the FFNs of memory layers are drawn anew; a checkpoint keeps its origin."""
    corpus, config = Corpus("tiny"), pretrain.Config(**TINY)
    start, origin = pretrain.make_model(config, corpus, None)
    assert origin == {"init_checkpoint": "", "first_step": 0, "pooler_trained": False}
    shutil.copytree(save_model("out/start", start).parent, "out/go_on")
    shutil.copy("tiny.txt", "out/start/vocab.txt")
    for reinit in (False, True):
        changed = dataclasses.replace(config, init_from="out/start", reinit_ffn=reinit)
        model, _ = pretrain.make_model(changed, corpus, None)
        same = [torch.equal(a.up.weight, b.up.weight) for a, b in
                zip(start.bert.layers, model.bert.layers, strict=True)]
        assert same == [True, not reinit, not reinit, True]
    origin = {"init_checkpoint": "x", "first_step": 7, "pooler_trained": True}
    Path("out/go_on/config.json").write_text(json.dumps(origin))
    _, found = pretrain.make_model(config, corpus, Run("out/go_on").newest_checkpoint())
    assert origin.items() <= found.items()


def test_a_tasks_head_is_not_copied(plain_run, capsys):
    """The trained pooler is. A start from an unfinished run is a warning."""
    sizes = tiny_bert().bert.config
    tuned = Classifier(sizes, 2)
    start = save_model(plain_run[1].parent / "tuned", tuned)
    (start.parent / "config.json").write_text('{"max_steps": 9}')
    model = Classifier(sizes, 2)
    head = model.head.weight.clone()
    init_from(model, start)
    assert torch.equal(model.head.weight, head) and not torch.equal(head, tuned.head.weight)
    assert torch.equal(model.bert.pooler.weight, tuned.bert.pooler.weight)
    assert "is of an unfinished run: 3 of 9 steps" in capsys.readouterr().out


def test_what_a_run_prints_before_it_trains(place, monkeypatch, capsys):
    """12 steps of 2 x 2 sequences; an epoch is every full sequence of 14 tokens but one."""
    seen, flops = [], pretrain.flops_per_token
    monkeypatch.setattr(pretrain, "flops_per_token",
                        lambda model, seq_len: seen.append(seq_len) or flops(model, seq_len))
    assert train("--max_steps=12") == 0
    tokens = len(Corpus("tiny").split("train"))
    said = capsys.readouterr().out
    assert f"12 steps of 2 x 2 sequences, 64 tokens: {48 / (tokens // 14 - 1):.1f} epochs" in said
    assert f"{tokens:,} training tokens" in said and seen == [16]


def test_no_snapshots_and_few_checkpoints(place):
    args = ["--max_steps=4", "--checkpoint_interval=1", "--usage_interval=0", "--eval_interval=99"]
    for keep in (1, 3):
        assert train(*args, f"--keep_checkpoints={keep}", f"--out=out/{keep}") == 0
        names = sorted(path.name for path in Path(f"out/{keep}").iterdir())
        steps = [f"step_{n:06d}" for n in range(5 - keep, 5)]
        assert names == ["config.json", "log.jsonl", *steps, "vocab.txt"]


def test_the_last_step_and_every_snapshot_are_evaluated(place):
    """Whatever the intervals: the end comes before any of them."""
    long = [f"--{name}_interval=100" for name in ("log", "eval", "checkpoint")]
    assert train("--max_steps=7", "--usage_interval=3", *long) == 0
    assert [r["step"] for r in log() if "perplexity" in r] == [0, 1, 2, 3, 4, 6, 7]
    assert [r["step"] for r in log() if "grad_norm" in r] == [7]
    assert sorted(os.listdir("out/tiny/usage")) == [f"step_00000{n}.npz" for n in (3, 6, 7)]
    assert [path.name for path in Run("out/tiny").checkpoints()] == ["step_000007"]


@pytest.mark.parametrize("card, peak", [("Tesla V100-SXM2-32GB", 125e12), ("NVIDIA H200", 989e12)])
def test_peaks_are_dense_ones(monkeypatch, card, peak):
    """As in the data sheets, without sparsity."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert peak_flops(torch.device("cuda")) == peak


def test_two_processes_do_not_train_in_one_folder(place):
    """Two start at the same moment: one goes on, the other prints one line and writes nothing."""
    both = [subprocess.Popen(command("--max_steps=300", "--eval_interval=1000"), text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    while all(process.poll() is None for process in both):
        time.sleep(0.01)
    first, second = sorted(both, key=lambda process: process.poll() is not None)
    error = second.stderr.read()
    assert second.returncode == 2 and error.count("\n") == 1, error
    assert f"out/tiny: process {first.pid} trains there" in error
    assert train("--out=out/tiny", "--dry_run=True") == 0  # what writes nothing is let in
    first.send_signal(signal.SIGTERM)
    first.communicate()
    second.communicate()
    assert first.returncode == 128 + signal.SIGTERM and steps_saved("out/tiny") > 0
    assert [path.name for path in Path("out").iterdir()] == ["tiny"]
