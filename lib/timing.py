"""
Time functions in turn, print their times, and say what machine they ran on.
"""
import operator
import os
import platform
import resource
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lib.device import Progress, markdown


def time_in_turn(what, functions, device, rounds, warmup=2, bases=1):
    """Time {name: function} in turn: a busy moment of the machine slows every function.

    Returns a record for each name. It has the seconds of each round, and the ratio to the first
    `bases` functions: the median of the rounds' ratios. The rounds of warm-up, in which models
    compile, do not count, but their total time is printed.
    """
    synchronize = getattr(torch, device.type).synchronize
    times = {name: [] for name in functions}
    for _ in Progress(range(warmup + rounds), what):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            times[name].append(time.perf_counter() - start)
    total = sum(sum(seconds[:warmup]) for seconds in times.values())
    print(f"{what}: warm-up {total:.1f} s")
    times = {name: seconds[warmup:] for name, seconds in times.items()}
    return [{"what": what, "system": name, "seconds": seconds,
             **{f"times_{base}": median(map(operator.truediv, seconds, times[base]))
                for base in list(times)[:bases]}}
            for name, seconds in times.items()]


def copy_bandwidth(device, elements=2**27):
    """Measure a copy's bandwidth: bytes read and written, per second. The median of rounds of 4
    copies. The default is 512 MB to 512 MB, more than most caches hold."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)

    def copy():
        for _ in range(4):
            target.copy_(source)

    [record] = time_in_turn("copy", {"copy": copy}, device, rounds=5, warmup=1)
    return 4 * 2 * source.nbytes / median(record["seconds"])


def print_times(records):
    """Print a table for each set of keys; times as median [lowest, highest]."""
    def text(value):
        if isinstance(value, list):
            return "{:.4g} [{:.4g}, {:.4g}] ms".format(
                *(1e3 * seconds for seconds in (median(value), min(value), max(value))))
        form = {int: "{:,}", float: "{:.4g}"}.get(type(value))
        return form.format(value) if form else value

    tables = {}
    for record in records:
        tables.setdefault(tuple(record), []).append(map(text, record.values()))
    for keys, rows in tables.items():
        print(markdown([key.replace("_", " ") for key in keys], rows))


def machine_facts(device):
    """Return what times depend on, as texts: processor, OpenMP's variables, version of torch."""
    machine = read_proc("cpuinfo", "model name") or platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    openmp = [f"{name}={value}" for name, value in sorted(os.environ.items())
              if name.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {"machine": f"{machine}, {torch.get_num_threads()} threads",
            "openmp": " ".join(openmp) or "default", "torch": torch.__version__}


def read_proc(file, key):
    """Return the value of the first `key` in /proc/<file>, or None (macOS has no /proc)."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if key in line), None)


def fits(what, size, device):
    """Tell whether the device has `size` bytes free, and print it if `what` is skipped."""
    free = 1024 * float((read_proc("meminfo", "MemAvailable") or "inf").split()[0])
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    if size > 0.9 * free:
        print(f"skipped: {what} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    return size <= 0.9 * free


def peak_bytes(device):
    """Return the peak memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
