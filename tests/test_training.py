"""
Compare the parts of a training step with their definitions, and FLOPs with torch's own count.
"""
import collections
import contextlib
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pretrain
from lib.run import Run
from lib.settings import Failure
from lib.training import (
    check_finite,
    checkpoint_files,
    duration,
    flops_per_token,
    learning_rate,
    log_training,
    make_optimizers,
    restore,
    seed_dropout,
    set_rate,
    share_of_peak,
    status_after,
    update,
)
from tests.helpers import tiny_bert


@pytest.mark.parametrize("keys_lr", [0.5, 3.0])
def test_what_the_optimizers_have(keys_lr):
    model = tiny_bert(memory_layers=(2, 3))
    config = pretrain.Config(weight_decay=0.3, keys_lr=keys_lr, lr=0.02, warmup_steps=0,
                             max_steps=4)
    dense, values = make_optimizers(model, config, torch.device("cpu"))
    decayed, others, keys = dense.param_groups
    assert (decayed["weight_decay"], others["weight_decay"], keys["weight_decay"]) == (0.3, 0, 0)
    groups = collections.Counter()
    for group in (decayed, others, keys):
        groups.update(id(p) for p in group["params"])
    for name, p in model.named_parameters():
        assert groups[id(p)] == (not name.endswith("values.weight")), name
        decays = not ("norm" in name or name.endswith("bias") or ".memory." in name)
        assert any(p is q for q in decayed["params"]) == decays, name
        assert any(p is q for q in keys["params"]) == name.endswith("memory.keys"), name
    set_rate(dense, config, 2)
    rates = [group["lr"] for group in dense.param_groups]
    assert rates == pytest.approx([0.01, 0.01, 0.01 * keys_lr])
    assert len(values.tables) == 2
    model.bert.layers[1].memory.values.learns = False
    assert len(make_optimizers(model, config, torch.device("cpu"))[1].tables) == 1


def test_learning_rate():
    config = pretrain.Config(lr=0.1, warmup_steps=4, max_steps=10)
    rates = [0.025, 0.05, 0.075, 0.1, 0.1, 0.1 * 5 / 6, 0.1 * 4 / 6, 0.05, 0.1 * 2 / 6, 0.1 / 6]
    assert [learning_rate(config, step) for step in range(10)] == pytest.approx(rates)
    config = pretrain.Config(lr=0.1, warmup_steps=0, max_steps=2)
    assert [learning_rate(config, step) for step in range(2)] == pytest.approx([0.1, 0.05])


def test_dropout_is_a_function_of_seed_step_and_micro_batch():
    def draw(*key):
        seed_dropout(*key)
        return torch.rand(1).item()

    keys = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)]
    draws = [draw(*key) for key in keys]
    assert len(set(draws)) == 4 and [draw(*key) for key in keys] == draws


@pytest.mark.parametrize("loss, norm, dtype, stops", [
    (1.0, 1.0, "float32", False), (math.nan, 1.0, "float32", True),
    (1.0, math.inf, "bfloat16", True), (1.0, math.inf, "float16", False),
    (math.inf, 1.0, "float16", True)])
def test_a_loss_or_norm_that_is_no_number_stops(loss, norm, dtype, stops):
    """Accept an infinite norm in float16, whose step the scaler leaves out, but no such loss."""
    config = pretrain.Config(dtype=dtype)
    with pytest.raises(Failure, match="step 8") if stops else contextlib.nullcontext():
        check_finite([(1.0, 0.5), (loss, norm), (1.0, 0.5)], config, 9)


@pytest.mark.parametrize("overflows, share", [(False, 0.5), (False, 0), (True, 0.5)])
def test_update(overflows, share):
    """Clip, move weights and values, drop gradients and reads. An overflow moves nothing.

    share: of the norm, to which gradients are clipped; 0 clips nothing.
    """
    model = tiny_bert(memory_layers=(2,))
    dense, sparse = make_optimizers(model, pretrain.Config(), torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ids = torch.randint(40, (2, 9))
    scaler.scale(model(ids, labels=ids)).backward()
    grads = {p: p.grad / 4 for p in model.parameters() if p.grad is not None}
    expected = sum(grad.square().sum() for grad in grads.values()).sqrt()
    before = {name: p.clone() for name, p in model.named_parameters()}
    if overflows:
        model.bias.grad[0] = math.inf
    norm = update(dense, sparse, scaler, expected.item() * share)
    for name, p in model.named_parameters():
        moves = not overflows and "pooler" not in name
        assert torch.equal(p, before[name]) != moves, name
        assert p.grad is None
    assert not sparse.tables[0].pending
    if overflows:
        assert math.isinf(norm) and scaler.get_scale() == 2
    else:
        assert norm.item() == pytest.approx(expected.item())
        for p, grad in grads.items():  # 0.1: 1 - beta1
            torch.testing.assert_close(dense.state[p]["exp_avg"], 0.1 * grad * (share or 1))


def test_a_checkpoint_gives_back_state_moments_and_scale(tmp_path):
    def make():
        model = tiny_bert(memory_layers=(2,))
        dense, values = make_optimizers(model, pretrain.Config(), torch.device("cpu"))
        return model, dense, values, torch.amp.GradScaler("cpu", init_scale=4.0)

    model, dense, values, scaler = make()
    scaler.scale(torch.ones(1))  # it has a scale from here on
    scaler.update(8.0)
    ids = torch.randint(40, (2, 9))
    model(ids, labels=ids).backward()
    dense.step()
    values.step()
    state = {"step": 3, "elapsed": 7.0, "seconds": 2.0, "losses": [1.5], "best": {"epoch": 2}}
    files = checkpoint_files(model, (), dense, values, scaler, state)
    folder = Run(tmp_path).save_checkpoint(3, files, keep=2)
    other = make()[1:]
    other[0].defaults["fused"] = False  # as of another device
    assert restore(folder, *other) == state
    assert other[2].get_scale() == 8
    assert not any(group["fused"] for group in other[0].param_groups)
    for mine, theirs in zip(other[:2], (dense, values), strict=True):
        pairs = list(zip(mine.state.values(), theirs.state.values(), strict=True))
        assert pairs
        for a, b in pairs:
            assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) and a["step"] == b["step"]


def test_under_torchrun_a_stopped_run_is_no_failure(monkeypatch):
    assert status_after([15]) == 143
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert status_after([15]) == 0  # else torchrun would start the ranks again


class Batches:
    size, unit = 2, "examples"

    def epochs(self, steps):
        return steps / 4


def test_a_record_and_its_line(tmp_path, capsys):
    records, run, config = [], Run(tmp_path), pretrain.Config(max_steps=6, warmup_steps=0, lr=0.6)
    run.log = records.append
    state = {"step": 3, "elapsed": 11.5, "seconds": 1.5, "losses": [1.0, 2.0, 6.0]}
    log_training(run, state, config, Batches(), norm=7.0, peak_share=0.05)
    assert records == [pytest.approx({
        "step": 3, "epoch": 0.75, "loss": 3.0, "lr": 0.4, "grad_norm": 7.0, "examples_per_s": 4.0,
        "elapsed": 11.5, "mfu": 0.2})]
    said = capsys.readouterr().out
    assert "step 3/6 | epoch 0.75 | loss 3.0000 | 4 examples/s | mfu 20.0%" in said
    assert said.endswith(("eta 0:00:01\n", "eta 0:00:02\n"))


@pytest.mark.parametrize("memory", [{}, {"memory_layers": (2,)},
                                    {"memory_layers": (2, 3), "alpha": 0.0}])
def test_flops_are_torchs_count(memory):
    model = tiny_bert(max_len=20, **memory)
    ids, positions = torch.zeros(2, 20, dtype=torch.long), torch.tensor([[1, 5, 9]] * 2)  # 15%
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, positions=positions, labels=positions).backward()
    assert flops_per_token(model, 20) == pytest.approx(counter.get_total_flops() / 40)


@pytest.mark.parametrize("card, peak", [
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA L40S", None)])
def test_share_of_a_cards_peak(monkeypatch, card, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    model, cuda = tiny_bert(), torch.device("cuda")
    share = share_of_peak(model, 16, cuda, torch.bfloat16)
    assert share == (peak and pytest.approx(flops_per_token(model, 16) / peak))
    assert share_of_peak(model, 16, cuda, torch.float32) is None
    assert share_of_peak(model, 16, torch.device("cpu"), torch.bfloat16) is None


def test_a_duration():
    assert (duration(59.6), duration(90061)) == ("0:01:00", "1 day, 1:01:01")
