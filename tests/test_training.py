"""
Compare the parts of a training step with their definitions, and FLOPs with torch's own count.
"""
import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pretrain
from lib.run import Run
from lib.settings import Failure
from lib.training import (
    checkpoint_files,
    flops_per_token,
    log_training,
    make_optimizers,
    restore,
    share_of_peak,
    status_after,
    step,
    take_stock,
)
from tests.helpers import tiny_bert


def cpu_settings(**more):
    return pretrain.Settings(device="cpu", dtype="float32", **more)


@pytest.mark.parametrize("loss, norm, dtype, stops", [
    (1.0, 1.0, "float32", False), (math.nan, 1.0, "float32", True),
    (1.0, math.inf, "bfloat16", True), (1.0, math.inf, "float16", False),
    (math.inf, 1.0, "float16", True)])
def test_a_loss_or_norm_that_is_no_number_stops(loss, norm, dtype, stops):
    """Accept an infinite norm in float16, whose step the scaler leaves out, but no such loss."""
    recent = [tuple(map(torch.tensor, pair)) for pair in ((1.0, 0.5), (loss, norm), (1.0, 0.7))]
    state = {"step": 6, "seconds": 0.0, "losses": [5.0]}
    with pytest.raises(Failure, match="step 8") if stops else contextlib.nullcontext():
        last = take_stock(recent, state, pretrain.Settings(dtype=dtype), 9, start=0.0)
        assert last == pytest.approx(0.7)
    assert state["step"] == (6 if stops else 9)
    assert state["losses"] == [5.0] if stops else [5.0, 1.0, loss, 1.0]


class Parts:
    """The micro-batches of a step: each has a row of ids, whose weights differ."""
    ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))

    def get(self, number, micro):
        row = self.ids[micro:micro + 1].numpy()
        return {"ids": row, "labels": row}, (0.25, 0.75)[micro]


@pytest.mark.parametrize("overflows, share", [(False, 0.5), (False, 0), (True, 0.5)])
def test_a_step(overflows, share):
    """Weigh the losses, clip, move weights and values, drop gradients and reads.

    An overflow moves nothing. share: of the norm, to which gradients are clipped; 0 clips nothing.
    """
    model = tiny_bert(memory_layers=(2,), dropout=0.0)
    model.bert.layers[1].memory.query_norm.momentum = 0.0  # the reference runs twice
    losses = [model(row[None], labels=row[None]) for row in Parts.ids]
    (losses[0] / 4 + losses[1] * 3 / 4).backward()
    grads = {p: p.grad for p in model.parameters() if p.grad is not None}
    norm = sum(grad.square().sum() for grad in grads.values()).sqrt().item()
    model.zero_grad()
    optimizers = make_optimizers(model, cpu_settings())._replace(
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    dense, sparse, scaler = optimizers
    sparse.zero_grad()
    before = {name: p.clone() for name, p in model.named_parameters()}
    if overflows:
        model.bias.register_hook(lambda grad: grad * math.inf)
    settings = cpu_settings(accumulation=2, grad_clip=norm * share)
    loss, found = step(0, model, Parts(), optimizers, settings)
    assert loss.item() == pytest.approx((losses[0] / 4 + losses[1] * 3 / 4).item())
    for name, p in model.named_parameters():
        if name.endswith("query.bias"):  # its gradient is rounding alone, before a batch norm
            continue
        moves = not overflows and "pooler" not in name
        assert torch.equal(p, before[name]) != moves, name
        assert p.grad is None
    assert not sparse.tables[0].pending
    if overflows:
        assert not math.isfinite(found) and scaler.get_scale() == 2
    else:
        assert found.item() == pytest.approx(norm)
        for p, grad in grads.items():  # 0.1: 1 - beta1
            torch.testing.assert_close(dense.state[p]["exp_avg"], 0.1 * grad * (share or 1))


def test_a_checkpoint_gives_back_state_and_scale(tmp_path):
    def make():
        model = tiny_bert(memory_layers=(2,))
        optimizers = make_optimizers(model, cpu_settings())
        return model, optimizers._replace(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    model, optimizers = make()
    optimizers.scaler.scale(torch.ones(1))  # it has a scale from here on
    optimizers.scaler.update(8.0)
    state = {"step": 3, "elapsed": 7.0, "seconds": 2.0, "losses": [1.5], "best": {"epoch": 2}}
    files = checkpoint_files(model, (), optimizers, state)
    folder = Run(tmp_path).save_checkpoint(3, files, keep=2)
    _, others = make()
    others.dense.defaults["fused"] = False  # as of another device
    assert restore(folder, others) == state
    assert others.scaler.get_scale() == 8
    assert not any(group["fused"] for group in others.dense.param_groups)


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
    settings = pretrain.Settings(max_steps=6, warmup_steps=0, lr=0.6)
    records, run = [], Run(tmp_path)
    run.log = records.append
    state = {"step": 3, "elapsed": 10.0, "seconds": 1.5, "losses": [1.0, 2.0, 6.0]}
    log_training(run, state, settings, Batches(), norm=7.0, peak_share=0.05)
    assert state == {"step": 3, "elapsed": 11.5, "seconds": 0.0, "losses": []}
    assert records[0].pop("kind") == "train"
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
    model = tiny_bert()
    settings = pretrain.Settings(device="cuda", dtype="bfloat16", seq_len=16)
    share = share_of_peak(model, settings)
    assert share == (peak and pytest.approx(flops_per_token(model, 16) / peak))
    assert share_of_peak(model, replace(settings, dtype="float32")) is None
    assert share_of_peak(model, replace(settings, device="cpu")) is None
