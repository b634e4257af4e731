"""
Choose the device and the dtype, and use a CPU well.
"""
import ctypes
import os
import sys

from lib.common.errors import UserError
from lib.common.torchrun import first_rank, under_torchrun


def choose_device(device="auto", dtype="auto"):
    """Choose the device and the dtype of the matrix products.

    device: 'auto' (cuda, else mps, else cpu) or a torch device. dtype: 'auto', 'float32',
    'bfloat16' or 'float16'; all but float32 are for torch.autocast, and float16 for a GradScaler.
    Returns (torch.device, torch.dtype, a line to print).
    """
    import torch

    if under_torchrun() and ":" in device:
        raise UserError(f"device = {device!r}: each rank takes its own card: --device=cuda")
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
    card = f" ({torch.cuda.get_device_name(chosen)})" if chosen.type == "cuda" else ""
    line = f"device {chosen}{card}, torch {torch.__version__}, dtype {dtype}: {reason}"
    return chosen, getattr(torch, dtype), line


def use_device(device, dtype):
    """Choose the device and the dtype, print why, and prepare a CPU for a long run."""
    chosen, dtype, line = choose_device(device, dtype)
    print(line)
    if advice := cpu_advice(chosen):
        print(advice)
    keep_freed_memory(chosen)
    return chosen, dtype


def cpu_advice(device):
    """Advise fewer threads on a busy CPU (see thread_advice), in a line to print, or None."""
    import torch

    if device.type != "cpu" or not first_rank():
        return None
    try:
        load = os.getloadavg()[0]  # of the last minute
    except OSError:  # unknown, as where /proc is missing
        return None
    return thread_advice(load, os.cpu_count(), torch.get_num_threads())


def thread_advice(load, cores, threads):
    """Advise one thread for each free core, in a line, or None if enough are free.

    A thread that waits for a core makes all others wait. Beside one busy process on two cores, one
    thread was 2.8 times as fast as two (results/speed.md). `load` is the machine's load average.
    """
    free = max(1, int(cores - load))
    if load < cores / 4 or threads <= free:
        return None
    return (f"load average {load:.1f} on {cores} cores: if other processes keep them busy, "
            f"OMP_NUM_THREADS={free} is faster than {threads} threads")


def keep_freed_memory(device):
    """Keep the memory that a CPU process frees, for its next step. By default glibc gives large
    blocks back to Linux, which has to clear every page anew."""
    linux = device.type == "cpu" and sys.platform == "linux"
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if linux else None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
