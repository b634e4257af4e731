"""
Choose the device and the dtype, and use a CPU well.
"""
import ctypes
import platform
import sys
from datetime import timedelta

import torch
from tqdm import tqdm

from lib.errors import UserError
from lib.files import first_rank, under_torchrun
from lib.settings import check_choice


def choose_device(device="auto", dtype="auto"):
    """Choose the device and the dtype of the matrix products.

    device: 'auto' (cuda, else mps, else cpu) or a torch device. dtype: 'auto', 'float32',
    'bfloat16' or 'float16'; all but float32 are for torch.autocast, and float16 for a GradScaler.
    Returns (torch.device, torch.dtype, a line to print).
    """
    check_choice("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    if device == "auto" and torch.cuda.is_available():
        device = "cuda"
    elif device == "auto" and torch.backends.mps.is_available() and not under_torchrun():
        device = "mps"
    elif device == "auto":
        device = "cpu"
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # unknown or absent
        raise UserError(f"device = {device!r}: {str(error).splitlines()[0]}") from None

    name, card, reason = str(chosen), chosen.type == "cuda", "as asked"
    if card:
        if chosen.index is not None:
            torch.cuda.set_device(chosen)
        name += f" ({torch.cuda.get_device_name(chosen)})"
        # cuDNN's attention can have a NaN gradient on an H100, with a mask and 128 n + 64 tokens
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto" and not card:
        dtype, reason = "float32", f"mixed precision is for CUDA, this is {chosen.type}"
    elif dtype == "auto" and torch.cuda.get_device_capability(chosen) >= (8, 0):
        dtype, reason = "bfloat16", "the card computes in it: float32's range, no scaler"
    elif dtype == "auto":
        dtype, reason = "float16", "the card has no bfloat16: gradients are scaled"
    line = f"device {name}, torch {torch.__version__}, dtype {dtype}: {reason}"
    return chosen, getattr(torch, dtype), line


def use_device(device, dtype):
    """Choose device and dtype, print why, and prepare a CPU for a long run."""
    chosen, dtype, line = choose_device(device, dtype)
    print(line)
    keep_freed_memory(chosen)
    return chosen, dtype


def keep_freed_memory(device):
    """Keep the memory that a CPU process frees: glibc's default has Linux clear pages anew."""
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def autocast(device, dtype):
    """Return torch.autocast, which does nothing if dtype is float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def to_device(batch, device):
    """Turn {name: array} into {name: tensor} on the device."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if device.type == "cuda":
        return {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return {name: t.to(device) for name, t in tensors.items()}


def wants_compile(setting, device):
    """Tell whether the setting "on", "off" or "auto" (on CUDA) asks for torch.compile."""
    check_choice("compile", setting, ("auto", "on", "off"))
    return setting == "on" or setting == "auto" and device.type == "cuda"


class Progress(tqdm):
    """Show a bar on the first rank. Away from a terminal it is drawn every 10 seconds."""

    def __init__(self, *args, **settings):
        pause = 0.1 if sys.stderr.isatty() else 10
        super().__init__(*args, mininterval=pause, delay=pause, disable=not first_rank(),
                         **settings)


def duration(seconds):
    """Format seconds as days, hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
