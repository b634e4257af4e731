"""
The device, its dtype, and the advice on a busy CPU.
"""
import os

import pytest
import torch

from lib.common.device import choose_device, cpu_advice, thread_advice
from lib.common.errors import UserError


def test_what_is_chosen_is_returned_and_not_printed(capsys):
    device, dtype, line = choose_device("cpu")
    assert (device, dtype) == (torch.device("cpu"), torch.float32)
    assert line.startswith("device cpu, torch ") and "mixed precision is for CUDA" in line
    assert choose_device("cpu", "bfloat16")[1:] == (torch.bfloat16, line.replace(
        "float32: mixed precision is for CUDA, this is cpu", "bfloat16: as asked"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("args, word", [
    (("gpu",), "gpu"), (("meta",), "meta"), (("cpu", "float64"), "expected auto, float32"),
    (("cpu", "float16"), "needs CUDA")])
def test_a_device_that_cannot_be(args, word):
    with pytest.raises(UserError, match=word):
        choose_device(*args)


@pytest.mark.parametrize("load, cores, threads, advised", [
    (0.1, 2, 2, None), (0.9, 2, 2, 1), (3.5, 2, 2, 1), (0.9, 2, 1, None), (5.2, 16, 16, 10),
    (5.2, 16, 8, None), (1.0, 64, 64, None)])
def test_advice_is_a_thread_for_each_free_core(load, cores, threads, advised):
    line = thread_advice(load, cores, threads)
    assert f"OMP_NUM_THREADS={advised} " in line if advised else line is None


def test_advice_is_for_the_first_rank_on_a_cpu(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert "OMP_NUM_THREADS=1 is faster than 8 threads" in cpu_advice(torch.device("cpu"))
    assert cpu_advice(torch.device("cuda")) is None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert cpu_advice(torch.device("cpu")) is None


def test_an_unknown_load_gives_no_advice(monkeypatch):
    def getloadavg():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", getloadavg)
    assert cpu_advice(torch.device("cpu")) is None
