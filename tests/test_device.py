"""
Choose a device and a dtype.
"""
import pytest
import torch

import finetune
from lib.device import autocast, set_up_device, to_device, wants_compile
from lib.settings import UserError
from tests.helpers import train

CPU = torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_a_card_is_chosen_before_all_else(capsys):
    device, dtype = set_up_device()
    assert device.type == "cuda" and dtype != torch.float32
    assert torch.cuda.get_device_name() in capsys.readouterr().out
    batch = to_device({"ids": torch.ones(2, 3).numpy()}, device)
    with autocast(device, dtype):
        assert (batch["ids"] @ batch["ids"].T).dtype == dtype


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_cards_from_the_a100_on_compute_in_bfloat16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", bool)
    for name, value in ("get_device_name", "a card"), ("get_device_capability", capability):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert set_up_device("cuda")[1] == dtype


def test_a_memory_does_not_learn_on_mps_unless_one_insists(tuned, monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train("--device=auto", "--max_steps=5") == finetune.main(["tune.py", "--device=auto"])
    assert capsys.readouterr().out.count("--device=mps") == 2
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    for device, memory, chosen in ("auto", (), "mps"), ("auto", (2,), "cpu"), ("mps", (2,), "mps"):
        assert set_up_device(device, memory=memory)[0].type == chosen


@pytest.mark.parametrize("device, dtype, word", [
    ("gpu", "auto", "gpu"), ("meta", "auto", "meta"), ("cpu", "float8", "float8")])
def test_a_device_or_dtype_that_cannot_be(device, dtype, word):
    with pytest.raises(UserError, match=word):
        set_up_device(device, dtype)


def test_compilation_is_for_cuda_or_as_asked():
    assert [wants_compile(x, CPU) for x in ("auto", "on", "off")] == [False, True, False]
    assert wants_compile("auto", torch.device("cuda"))
    with pytest.raises(UserError, match="compile = 'maybe'"):
        wants_compile("maybe", CPU)
