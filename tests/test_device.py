"""
The device and its dtype, and what a person sees of progress.
"""
import itertools
import sys

import pytest
import torch
import tqdm

from lib.device import Progress, autocast, choose_device, duration, to_device, wants_compile
from lib.errors import UserError

CPU = torch.device("cpu")


def test_what_is_chosen_is_returned_with_its_reason(capsys):
    device, dtype, line = choose_device("cpu")
    assert (device, dtype) == (CPU, torch.float32)
    assert line.startswith("device cpu, torch ") and "mixed precision is for CUDA" in line
    assert choose_device("cpu", "bfloat16")[1] == torch.bfloat16
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_a_card_is_chosen_before_all_else():
    device, dtype, line = choose_device()
    assert device.type == "cuda" and dtype != torch.float32
    assert torch.cuda.get_device_name() in line
    batch = to_device({"ids": torch.ones(2, 3).numpy()}, device)
    with autocast(device, dtype):
        assert (batch["ids"] @ batch["ids"].T).dtype == dtype


@pytest.mark.parametrize("device, dtype, word", [
    ("gpu", "auto", "gpu"), ("meta", "auto", "meta"), ("cpu", "float8", "float8")])
def test_a_device_or_dtype_that_cannot_be(device, dtype, word):
    with pytest.raises(UserError, match=word):
        choose_device(device, dtype)


def test_mixed_precision_is_for_products():
    w = torch.ones(2, 2)
    for dtype in (torch.float32, torch.bfloat16):
        with autocast(CPU, dtype):
            assert (w @ w).dtype == dtype
        assert w.dtype == torch.float32


def test_compilation_is_for_cuda_or_as_asked():
    assert [wants_compile(x, CPU) for x in ("auto", "on", "off")] == [False, True, False]
    assert wants_compile("auto", torch.device("cuda"))
    with pytest.raises(UserError, match="compile = 'maybe'"):
        wants_compile("maybe", CPU)


def test_progress_on_a_pipe_is_shown_now_and_then(capsys, monkeypatch):
    """And on a terminal again and again."""
    clock = itertools.count(step=4)
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(clock)))
    monkeypatch.setattr(Progress, "monitor_interval", 0)
    assert list(Progress(range(10), "reading")) == list(range(10))
    assert 2 <= capsys.readouterr().err.count("\rreading: ") <= 5
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(Progress(range(10), "reading"))
    assert capsys.readouterr().err.count("\rreading: ") > 5


def test_a_duration():
    assert (duration(59.6), duration(90061)) == ("0:01:00", "1 day, 1:01:01")
