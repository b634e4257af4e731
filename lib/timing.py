"""
Time functions in turn, print their times, and name the machine.
"""
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lib.device import Progress
from lib.figures import markdown


def time_in_turn(what, functions, device, rounds, warmup=2, bases=1):
    """Time {name: function} in turn: a busy moment of the machine slows every function.

    Returns a record for each name. "seconds" has the time of each round. "times_NAME" compares with
    function NAME, for the first `bases` functions: the median of the rounds' ratios. Models compile
    in the rounds of warm-up, which do not count.
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
    warming = sum(sum(seconds[:warmup]) for seconds in times.values())
    print(f"{what}: warm-up {warming:.1f} s")

    records = []
    for name, seconds in times.items():
        record = {"what": what, "system": name, "seconds": seconds[warmup:]}
        for base in list(functions)[:bases]:
            ratios = [own / other for own, other in zip(seconds, times[base], strict=True)]
            record[f"times_{base}"] = median(ratios[warmup:])
        records.append(record)
    return records


def copy_bandwidth(device, elements=2**27):
    """Measure the bandwidth of a copy: bytes read and written per second.

    The default, 512 MB to 512 MB, is more than most caches hold."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)

    def copy():
        for _ in range(4):
            target.copy_(source)

    [record] = time_in_turn("copy", {"copy": copy}, device, rounds=5, warmup=1)
    return 4 * 2 * source.nbytes / median(record["seconds"])


def print_times(records):
    """Print a table of the records with the same keys. Times are median [lowest, highest]."""
    tables = {}
    for record in records:
        row = [as_text(value) for value in record.values()]
        tables.setdefault(tuple(record), []).append(row)
    for keys, rows in tables.items():
        print(markdown([key.replace("_", " ") for key in keys], rows))


def as_text(value):
    if isinstance(value, list):
        low, middle, high = (1e3 * pick(value) for pick in (min, median, max))
        return f"{middle:.4g} [{low:.4g}, {high:.4g}] ms"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def machine_facts(device):
    """Return what times depend on: processor, OpenMP's variables, version of torch."""
    machine = read_proc("cpuinfo", "model name") or platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    openmp = [f"{name}={value}" for name, value in sorted(os.environ.items())
              if name.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {"machine": f"{machine}, {torch.get_num_threads()} threads",
            "openmp": " ".join(openmp) or "default", "torch": torch.__version__}


def read_proc(file, key):
    """Return the first value of `key` in /proc/<file>, or None (macOS has no /proc)."""
    path = Path("/proc", file)
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None


def fits(what, size, device):
    """Tell whether the device has `size` bytes free. If not, print that `what` is skipped."""
    available = read_proc("meminfo", "MemAvailable")
    free = 1024 * int(available.split()[0]) if available else float("inf")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    if size > 0.9 * free:
        print(f"skipped: {what} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    return size <= 0.9 * free


def peak_bytes(device):
    """Return the highest memory that this process has used."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Windows lacks it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
