"""
Choose the device and the dtype, and use a CPU well.
"""
import ctypes
import platform

import torch

from lib.ranks import under_torchrun
from lib.settings import UserError, check_choice


def set_up_device(device="auto", dtype="auto", file=None, memory=False):
    """Choose the device and the dtype of matrix products; print them, to `file` or stdout.

    device: 'auto' (cuda, else mps, else cpu; no mps where a `memory` learns) or a torch device.
    dtype: 'auto', 'float32', 'bfloat16' or 'float16'; all but float32 are for torch.autocast, and
    float16 for a GradScaler. Returns (torch.device, torch.dtype). A CPU is prepared for a long run.
    """
    check_choice("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    if device == "auto":
        device = "cpu"
        if torch.backends.mps.is_available() and not under_torchrun():
            device = "mps"
            if memory:  # pytorch #160993: index_copy_; #183885: sort; #111173: unique's counts
                device = "cpu"
                print("a memory learns on the CPU, for torch's MPS has given wrong results in what "
                      "its update calls: --device=mps insists")
        if torch.cuda.is_available():
            device = "cuda"
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # unknown or absent
        raise UserError(f"device = {device!r}: {str(error).splitlines()[0]}") from None

    name, best, reason = str(chosen), "float32", "as set"
    if chosen.type == "cuda":
        if chosen.index is not None:
            torch.cuda.set_device(chosen)
        name += f" ({torch.cuda.get_device_name(chosen)})"
        # pytorch #196678: with a mask and 128 n + 64 tokens cuDNN can give a NaN gradient
        torch.backends.cuda.enable_cudnn_sdp(False)
        bfloat16 = torch.cuda.get_device_capability(chosen) >= (8, 0)
        best = "bfloat16" if bfloat16 else "float16"  # float16 needs scaled gradients
    if dtype == "auto":
        dtype, reason = best, "the default here"
    print(f"device {name}, torch {torch.__version__}, dtype {dtype}: {reason}", file=file)
    if chosen.type == "cpu" and platform.libc_ver()[0] == "glibc":
        # keep the memory that the process frees: by default Linux clears its pages anew
        m_trim_threshold, m_mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    return chosen, getattr(torch, dtype)


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
