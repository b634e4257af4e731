"""
The device, its dtype, and the advice on a busy CPU.
"""
import os
import types

import pytest
import torch
from torch.torch_version import TorchVersion

from lib.device import choose_device, prepare_card, thread_advice, use_device
from lib.errors import UserError


def test_what_is_chosen_is_returned_and_not_printed(capsys):
    device, dtype, line = choose_device("cpu")
    assert (device, dtype) == (torch.device("cpu"), torch.float32)
    assert line.startswith("device cpu, torch ") and "mixed precision is for CUDA" in line
    assert choose_device("cpu", "bfloat16")[1:] == (torch.bfloat16, line.replace(
        "float32: mixed precision is for CUDA, this is cpu", "bfloat16: as asked"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("args, word", [
    (("gpu",), "gpu"), (("meta",), "meta"), (("cpu", "float16"), "needs CUDA")])
def test_a_device_that_cannot_be(args, word):
    with pytest.raises(UserError, match=word):
        choose_device(*args)


@pytest.mark.parametrize("load, cores, threads, advised", [
    (0.1, 2, 2, None), (0.9, 2, 2, 1), (3.5, 2, 2, 1), (0.9, 2, 1, None), (5.2, 16, 16, 10),
    (5.2, 16, 8, None), (1.0, 64, 64, None)])
def test_advice_is_a_thread_for_each_free_core(monkeypatch, load, cores, threads, advised):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    line = thread_advice()
    if advised:
        assert f"OMP_NUM_THREADS={advised} is faster than {threads} threads" in line
    else:
        assert line is None


@pytest.mark.parametrize("capability, dtype, reason", [
    ((7, 0), "float16", "gradients are scaled"), ((7, 5), "float16", "gradients are scaled"),
    ((8, 0), "bfloat16", "no scaler"), ((9, 0), "bfloat16", "no scaler")])
def test_a_card_computes_in_the_precision_that_it_has(monkeypatch, capability, dtype, reason):
    """A card is chosen before all else. MPS comes next, in float32."""
    ones = types.SimpleNamespace(item=lambda: 1.0)
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones)  # no card is needed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    prepared = []
    monkeypatch.setattr("lib.device.prepare_card", prepared.append)
    device, chosen, line = choose_device()
    assert (device.type, chosen) == ("cuda", getattr(torch, dtype)) and reason in line
    assert prepared == [device]
    assert choose_device("cuda", "float32")[1] == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device()[:2] == (torch.device("mps"), torch.float32)


@pytest.mark.parametrize("name, current", [("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
@pytest.mark.parametrize("version, calls", [("2.14.1+cu130", [False]), ("2.15.0", [])])
def test_a_card_becomes_the_current_one(monkeypatch, name, current, version, calls):
    """And the attention that can fail on it is left out."""
    seen, switched = [], []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    prepare_card(torch.device(name))
    assert (seen, switched) == (current, calls)


def test_ranks_run_on_cards_or_cpus(monkeypatch):
    """On a Mac, too: gloo and NCCL exchange no tensors of MPS."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device()[0] == torch.device("cpu")
    with pytest.raises(UserError, match="--device=cpu"):
        choose_device("mps")


@pytest.mark.parametrize("load", [9.0, None])
def test_a_run_on_a_busy_cpu_prints_advice(monkeypatch, capsys, load):
    """But not where the load is unknown."""
    def getloadavg():
        if load is None:
            raise OSError
        return load, 0.0, 0.0

    monkeypatch.setattr(os, "getloadavg", getloadavg)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert use_device("cpu", "auto") == (torch.device("cpu"), torch.float32)
    assert ("OMP_NUM_THREADS=1" in capsys.readouterr().out) == (load is not None)
