"""
Choose the device and the dtype.
"""
import ctypes
import sys

from lib.common.errors import UserError
from lib.common.torchrun import under_torchrun

# OpenMP's threads spin while they wait, and so take the cores from whatever else runs. Spinning less
# costs little: tokens/s of configs/demo.py on two cores of a Zen 4 EPYC, quiet and beside one busy
# process, were 61,900 and 13,700 by default, 59,500 and 22,200 with this. OMP_NUM_THREADS=1, with
# 35,500 and 37,800, is for machines that are always busy (results/speed.md). The variables are read
# when torch is loaded, so a script imports this file before torch.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def choose_device(device="auto", dtype="auto", seed=0):
    """Choose the device and the dtype of the matrix products, say why, seed torch.

    device: 'auto' (cuda, else mps, else cpu) or a torch device; dtype: 'auto', 'float32',
    'bfloat16' or 'float16'. Returns (torch.device, torch.dtype); anything but float32 is meant
    for torch.autocast, with a GradScaler for float16.
    """
    import torch

    if under_torchrun() and ":" in device:
        raise UserError(f"device = {device!r}: each rank has a card of its own: --device=cuda")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = ("cuda" if cuda else "mps" if mps else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(name)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # unknown, absent, or without memory ('meta')
        raise UserError(f"device = {name!r}: {str(error).splitlines()[0]}") from None
    dtypes = ("float32", "bfloat16", "float16")
    if dtype not in ("auto", *dtypes):
        raise UserError(f"dtype = {dtype!r}: expected auto, {', '.join(dtypes)}")
    reason = "as asked"
    if dtype == "auto":
        if chosen.type != "cuda":
            dtype, reason = "float32", f"mixed precision is for CUDA, this is {chosen.type}"
        elif torch.cuda.get_device_capability(chosen) >= (8, 0):
            dtype, reason = "bfloat16", "the card computes in it: float32's range, no scaler"
        else:
            dtype, reason = "float16", "the card has no bfloat16: gradients are scaled"
    if dtype == "float16" and chosen.type != "cuda":
        raise UserError("dtype = 'float16' needs CUDA: take bfloat16 or float32")
    torch.manual_seed(seed)
    card = f" ({torch.cuda.get_device_name(chosen)})" if chosen.type == "cuda" else ""
    print(f"device {chosen}{card}, torch {torch.__version__}, dtype {dtype}: {reason}")
    return chosen, getattr(torch, dtype)


def keep_freed_memory(device):
    """Let a process that works on a CPU keep the memory that it frees for the next step. By
    default glibc gives large blocks back to Linux, which then has to clear every page anew."""
    linux = device.type == "cpu" and sys.platform == "linux"
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if linux else None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
